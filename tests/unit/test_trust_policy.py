"""Policies and envelopes: what is understood, and that nothing else is."""

from __future__ import annotations

import base64
import json
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from entries import make_key
from hypothesis import given, settings
from hypothesis import strategies as st

from kcache.errors import TrustError, UsageError
from kcache.trust.envelope import MAX_SIGNATURES, seal, unseal
from kcache.trust.keys import PrivateKey, generate, load, parse_public
from kcache.trust.policy import SYSTEM, find_policy, parse_policy, read_policy


@pytest.fixture
def key(tmp_path: Path) -> PrivateKey:
    generate(str(tmp_path / "a.key"))
    return load(str(tmp_path / "a.key"))


def policy(key: PrivateKey, more: str = "", rest: str = "") -> bytes:
    return f'format = "kcache.policy/1"\n{rest}\n[[key]]\nname = "a"\npublic = "{key.public.text}"\n{more}'.encode()


# Keys.


@pytest.mark.parametrize("mask", [0o000, 0o077, 0o777])
def test_a_key_is_private_whatever_the_umask_and_never_written_over(tmp_path: Path, mask: int) -> None:
    path = tmp_path / "a.key"
    before = os.umask(mask)
    try:
        public = generate(str(path))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert parse_public(public.text) == public == load(str(path)).public
    with pytest.raises(UsageError, match="never replaced"):
        generate(str(path))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_private_key_that_others_can_read_is_refused(tmp_path: Path, key: PrivateKey, mode: int) -> None:
    (tmp_path / "a.key").chmod(mode)
    with pytest.raises(TrustError, match="chmod 600"):
        load(str(tmp_path / "a.key"))


def test_a_key_of_another_algorithm_is_refused_and_not_quoted(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    path = tmp_path / "ec.key"
    path.write_bytes(generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    path.chmod(0o600)
    with pytest.raises(TrustError, match="no Ed25519 private key"):
        load(str(path))
    path.write_text("hunter2 is no key")
    with pytest.raises(TrustError) as caught:
        load(str(path))
    assert "hunter2" not in str(caught.value)


def test_openssl_reads_a_key(tmp_path: Path, key: PrivateKey) -> None:
    command = ["openssl", "pkey", "-in", str(tmp_path / "a.key"), "-pubout", "-outform", "DER"]
    try:
        found = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    except FileNotFoundError:
        pytest.skip("no openssl here")
    assert found.endswith(key.public.raw)


# Envelopes.


def changed(envelope: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    document = json.loads(envelope)
    change(document)
    return json.dumps(document).encode()


def set_in(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.update({name: value})


def in_signature(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["signatures"][0].update({name: value})


def doubled(document: dict[str, Any]) -> None:
    document["signatures"] *= 2


def too_many(document: dict[str, Any]) -> None:
    first = document["signatures"][0]
    document["signatures"] += [{"keyid": str(number), "sig": first["sig"]} for number in range(MAX_SIGNATURES)]


FORGED = base64.b64encode(b"{}").decode()
MALFORMED: dict[str, Callable[[dict[str, Any]], None]] = {
    "another payload": set_in("payload", FORGED),
    "payload not base64": set_in("payload", "***"),
    "payload with blanks": lambda d: d.update(payload=d["payload"][:8] + "\n" + d["payload"][8:]),
    "payload of another type": set_in("payloadType", "text/plain"),
    "payload no text": set_in("payload", 7),
    "unknown field": set_in("algorithm", "none"),
    "unknown field of a signature": in_signature("alg", "none"),
    "no signature": set_in("signatures", []),
    "signatures no list": set_in("signatures", {}),
    "signature empty": in_signature("sig", ""),
    "signature of zeros": in_signature("sig", base64.b64encode(bytes(64)).decode()),
    "signature too long": in_signature("sig", base64.b64encode(bytes(65)).decode()),
    "another key id": in_signature("keyid", "0" * 64),
    "key id no text": in_signature("keyid", 1),
    "one signature twice": doubled,
    "too many signatures": too_many,
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_envelope_is_refused(key: PrivateKey, name: str) -> None:
    good = seal({"a": 1}, key)
    assert unseal(good, key.public, "it") == {"a": 1}
    with pytest.raises(TrustError):
        unseal(changed(good, MALFORMED[name]), key.public, "it")


def test_a_name_that_is_repeated_is_refused(key: PrivateKey) -> None:
    good = seal({"a": 1}, key)
    with pytest.raises(TrustError, match="repeated"):
        unseal(b'{"payload":"' + FORGED.encode() + b'",' + good[1:], key.public, "it")


def test_a_cut_or_flipped_envelope_is_refused(key: PrivateKey) -> None:
    good = seal({"a": 1}, key)
    for place in range(len(good)):
        with pytest.raises(TrustError):
            unseal(good[:place], key.public, "it")
        with pytest.raises(TrustError):
            unseal(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :], key.public, "it")


def test_the_wrong_key_does_not_verify_under_the_right_id(tmp_path: Path, key: PrivateKey) -> None:
    generate(str(tmp_path / "b.key"))
    other = load(str(tmp_path / "b.key"))
    forged = changed(seal({"a": 1}, other), in_signature("keyid", key.public.id))
    with pytest.raises(TrustError, match="wrong signature"):
        unseal(forged, key.public, "it")


@given(st.binary(max_size=400))
@settings(max_examples=300, deadline=None)
def test_no_bytes_make_a_reader_of_envelopes_crash(data: bytes) -> None:
    public = parse_public("ed25519:" + base64.b64encode(bytes(32)).decode())
    assert public is not None
    with pytest.raises(TrustError):
        unseal(data, public, "it")


# Policies.


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("rolls = []", "'rolls' is not known"),
        ('roles = ["admin"]', "roles"),
        ('not_after = "2027"', "with its zone"),
        ("not_after = 2027-01-01T00:00:00", "with its zone"),
        ("kinds = []", "kinds: empty"),
        ('[[store]]\nmatch = "*"\nsignatures = "maybe"', "required or none"),
        ('[[store]]\nmatch = "*"\nkeys = ["b"]', "no key is named 'b'"),
        ('[[store]]\nsignatures = "none"', "match"),
        ("[index]\nthreshold = 1", "more than there are keys"),
        ("[index]\nthreshold = true", "threshold"),
        ('[index]\nfreeze = "perhaps"', "refuse or warn or ignore"),
        ("[other]", "'other' is not known"),
    ],
)
def test_a_policy_that_is_not_understood_is_refused(key: PrivateKey, more: str, message: str) -> None:
    parse_policy(policy(key), "it")
    with pytest.raises(TrustError, match=message):
        parse_policy(policy(key, more), "it")


@pytest.mark.parametrize("public", ["rsa:AAAA", "ed25519:AAAA", "AAAA", "ed25519:" + "A" * 43, 7])
def test_a_policy_takes_ed25519_keys_alone(public: object) -> None:
    text = f'format = "kcache.policy/1"\n[[key]]\nname = "a"\npublic = {json.dumps(public)}'
    with pytest.raises(TrustError, match="kcache keygen"):
        parse_policy(text.encode(), "it")


def test_a_key_that_is_there_twice_is_refused(key: PrivateKey) -> None:
    twice = policy(key) + f'[[key]]\nname = "b"\npublic = "{key.public.text}"'.encode()
    with pytest.raises(TrustError, match="twice"):
        parse_policy(twice, "it")


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o646])
def test_a_policy_that_others_can_change_is_refused(tmp_path: Path, key: PrivateKey, mode: int) -> None:
    path = tmp_path / "policy.toml"
    path.write_bytes(policy(key))
    path.chmod(0o644)
    (tmp_path / "link.toml").symlink_to(path)  # as Kubernetes mounts one
    assert read_policy(str(tmp_path / "link.toml")).keys[0].public == key.public
    path.chmod(mode)
    with pytest.raises(TrustError, match="can be changed by others"):
        read_policy(str(path))


def test_the_option_comes_before_the_variable_and_that_before_the_system() -> None:
    assert find_policy("given", {"KCACHE_POLICY": "variable"}) == "given"
    assert find_policy(None, {"KCACHE_POLICY": "variable"}) == "variable"
    assert find_policy(None, {}) == (SYSTEM if os.path.lexists(SYSTEM) else None)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ("", ""),
        ('kinds = ["samp*"]\narchs = ["90a"]\nmodels = ["*"]', ""),
        ('kinds = ["modules"]', "kind sampling"),
        ('archs = ["120*"]', "architecture 90a"),
        ('models = ["Qwen/*"]', r"model \(none\)"),
    ],
)
def test_a_key_publishes_what_it_may(key: PrivateKey, limits: str, why: str) -> None:
    import re

    trusted = parse_policy(policy(key, limits), "it").keys[0]
    found = trusted.unauthorized(make_key("cascade"))
    assert re.search(why, found) if why else not found


def test_a_key_counts_between_its_dates(key: PrivateKey) -> None:
    dates = "not_before = 2026-01-01T00:00:00Z\nnot_after = 2026-02-01T00:00:00Z"
    trusted = parse_policy(policy(key, dates), "it").keys[0]
    assert "counts from" in trusted.unfit(1767225599)
    assert not trusted.unfit(1767225600)
    assert not trusted.unfit(1769903999)
    assert "expired" in trusted.unfit(1769904000)
