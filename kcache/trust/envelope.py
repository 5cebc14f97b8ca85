"""DSSE envelopes of in-toto statements: what lies in a store beside manifests, and what a reader takes of it.

Format: https://github.com/secure-systems-lab/dsse (protocol and envelope, version 1). What kcache writes is what it reads:
unknown fields, repeated names, other base64 and more than one signature of one key are refused, and nothing of the payload is
parsed before a signature of it was verified. No I/O.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from kcache import digest
from kcache.errors import TrustError
from kcache.trust.keys import SIGNATURE_BYTES, PrivateKey, PublicKey

PAYLOAD_TYPE = "application/vnd.in-toto+json"
ENVELOPE_BYTES = 1 << 20
MAX_SIGNATURES = 16
_AGAIN = "Sign it again: `kcache sign`."


def encoded_for_signing(payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding (PAE): type and payload, each with its length: neither passes for the other."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def seal(statement: dict[str, Any], key: PrivateKey) -> bytes:
    """The envelope of a statement, signed by one key."""
    payload = digest.canonical_json(statement)
    signature = key.sign(encoded_for_signing(payload))
    return digest.canonical_json(
        {
            "payloadType": PAYLOAD_TYPE,
            "payload": base64.b64encode(payload).decode(),
            "signatures": [{"keyid": key.public.id, "sig": base64.b64encode(signature).decode()}],
        }
    )


def unseal(data: bytes, key: PublicKey, what: str) -> dict[str, Any]:
    """The statement in an envelope that `key` signed.

    Args:
        what: the envelope, for messages.

    Raises:
        TrustError: malformed, not signed by this key, or the signature is wrong.
    """
    payload, signatures = parse_envelope(data, what)
    signature = signatures.get(key.id)
    if signature is None:
        raise TrustError(f"{what} is not signed by key {key.id[:16]}", remedy=_AGAIN)
    if not key.verifies(signature, encoded_for_signing(payload)):
        raise TrustError(f"{what}: wrong signature of key {key.id[:16]}", remedy="Do not use this store: somebody changed it.")
    statement = _json(payload, what)
    if not isinstance(statement, dict):
        raise TrustError(f"{what} holds no statement", remedy=_AGAIN)
    return statement


def parse_envelope(data: bytes, what: str) -> tuple[bytes, dict[str, bytes]]:
    """Payload, not yet verified, and key id -> signature.

    Raises:
        TrustError: malformed.
    """
    if len(data) > ENVELOPE_BYTES:
        raise TrustError(f"{what} is larger than {ENVELOPE_BYTES} bytes")
    document = _json(data, what)
    if not isinstance(document, dict) or set(document) != {"payloadType", "payload", "signatures"}:
        raise TrustError(f"{what} is not an envelope", why="other fields than payloadType, payload and signatures", remedy=_AGAIN)
    if document["payloadType"] != PAYLOAD_TYPE:
        raise TrustError(f"{what} is of another type", why=f"payloadType is not {PAYLOAD_TYPE}", remedy=_AGAIN)
    listed = document["signatures"]
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_SIGNATURES:
        raise TrustError(f"{what} has no list of 1 to {MAX_SIGNATURES} signatures", remedy=_AGAIN)
    signatures: dict[str, bytes] = {}
    for item in listed:
        if not isinstance(item, dict) or set(item) != {"keyid", "sig"} or not isinstance(item["keyid"], str):
            raise TrustError(f"{what} has a malformed signature", why="other fields than keyid and sig", remedy=_AGAIN)
        if item["keyid"] in signatures:
            raise TrustError(f"{what} has two signatures of one key", remedy=_AGAIN)
        signature = _base64(item["sig"], what)
        if len(signature) != SIGNATURE_BYTES:
            raise TrustError(f"{what} has a signature of {len(signature)} bytes", why="Ed25519 has 64", remedy=_AGAIN)
        signatures[item["keyid"]] = signature
    return _base64(document["payload"], what), signatures


def _base64(text: object, what: str) -> bytes:
    try:
        if not isinstance(text, str):
            raise ValueError("not a text")
        data = base64.b64decode(text, validate=True)
        if base64.b64encode(data).decode() != text:
            raise ValueError("not in canonical form")
    except (binascii.Error, ValueError) as error:
        raise TrustError(f"{what} is not base64", why=str(error), remedy=_AGAIN) from error
    return data


def _json(data: bytes, what: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name is repeated")
        return found

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise TrustError(f"{what} is not a JSON document", why=str(error)[:200], remedy=_AGAIN) from error
