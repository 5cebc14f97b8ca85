"""Ed25519 keys: made, kept in files, and used through the package cryptography (extra `sign`), imported where it is needed.

A private key is a PEM file (PKCS #8, as openssl reads it) of mode 0600. A public key is one word, `ed25519:<base64 of 32 bytes>`,
and its id is the SHA-256 of those bytes. There is one algorithm and no field that names another.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import stat
from typing import Any

from kcache.errors import ProbeError, TrustError, UsageError
from kcache.values import dataclass

ALGORITHM = "ed25519"
KEY_BYTES, SIGNATURE_BYTES = 32, 64
_PEM_BYTES = 16 << 10
_NEEDED = "pip install 'kcache[sign]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicKey:
    """What verifies. `raw` is 32 bytes."""

    raw: bytes

    @property
    def id(self) -> str:
        """64 hex digits."""
        return hashlib.sha256(self.raw).hexdigest()

    @property
    def text(self) -> str:
        return f"{ALGORITHM}:{base64.b64encode(self.raw).decode()}"

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Whether the holder of the private key signed `message`.

        Raises:
            ProbeError: the package cryptography is not installed.
        """
        library = _library()
        try:
            library.Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except library.Invalid:
            return False
        return True


def parse_public(text: object) -> PublicKey | None:
    """A public key from its one word; None for anything else, another algorithm among it."""
    if not isinstance(text, str) or not text.startswith(f"{ALGORITHM}:"):
        return None
    try:
        raw = base64.b64decode(text.removeprefix(f"{ALGORITHM}:"), validate=True)
    except (binascii.Error, ValueError):
        return None
    key = PublicKey(raw=raw)
    return key if len(raw) == KEY_BYTES and key.text == text else None


class PrivateKey:
    """What signs. Its bytes are in no message and no document."""

    def __init__(self, key: Any) -> None:
        self._key = key
        self.public = PublicKey(raw=key.public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        signature = self._key.sign(message)
        assert isinstance(signature, bytes)
        return signature


def generate(path: str) -> PublicKey:
    """Writes a new private key to `path` (mode 0600, never over a file that is there) and returns its public key.

    Raises:
        UsageError: the file is there, or cannot be written. ProbeError: the package cryptography is not installed.
    """
    library = _library()
    key = library.Ed25519PrivateKey.generate()
    pem = key.private_bytes(library.Encoding.PEM, library.PrivateFormat.PKCS8, library.NoEncryption())
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as stream:
            os.fchmod(descriptor, 0o600)
            stream.write(pem)
            stream.flush()
            os.fsync(descriptor)
    except FileExistsError as error:
        raise UsageError(f"{path} is there already", remedy="Name another file: a key is never replaced.") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be written", why=error.strerror or "") from error
    return PrivateKey(key).public


def load(path: str) -> PrivateKey:
    """The private key in a file that only its owner can read.

    Raises:
        UsageError: it cannot be read. TrustError: others can read it, or it is no Ed25519 key.
    """
    library = _library()
    try:
        with open(path, "rb") as stream:
            found = os.fstat(stream.fileno())
            data = stream.read(_PEM_BYTES)
    except OSError as error:
        raise UsageError(f"the key {path} cannot be read", why=error.strerror or "") from error
    if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid not in (os.geteuid(), 0):
        raise TrustError(
            f"the key {path} can be read or changed by others (mode {stat.S_IMODE(found.st_mode):04o}, uid {found.st_uid})",
            remedy=f"Run `chmod 600 {path}`; if it was exposed, make a new key and revoke this one.",
        )
    try:
        key = library.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, library.Unsupported):  # not chained: a parser's message may quote what it read
        key = None
    if not isinstance(key, library.Ed25519PrivateKey):
        raise TrustError(f"{path} holds no Ed25519 private key", remedy="`kcache keygen FILE` makes one.")
    return PrivateKey(key)


class _Library:
    """What is used of cryptography."""

    def __init__(self) -> None:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

        self.Invalid, self.Unsupported = InvalidSignature, UnsupportedAlgorithm
        self.Ed25519PrivateKey, self.Ed25519PublicKey = Ed25519PrivateKey, Ed25519PublicKey

    def __getattr__(self, name: str) -> Any:
        from cryptography.hazmat.primitives import serialization

        return getattr(serialization, name)


def _library() -> _Library:
    try:
        return _Library()
    except ImportError as error:
        raise ProbeError(
            "signatures need the package cryptography", why="it is not installed", remedy=f"Run {_NEEDED}."
        ) from error
