"""The b12x package of a host, read without importing it: where it is, what it holds, and whether its rule for keys is known.

PyPI's `b12x` is a package of that name. FlashInfer 0.7.4 brings a copy, `flashinfer/experimental/b12x`, and a small package
`b12x` that imports the copy under the same name; where both are installed one hides the other, and both use one cache directory.
b12x keys its programs on the bytes of every file in its package (`_lib/compiler.py`, _compute_b12x_package_fingerprint), paths
taken inside the package: it is the same wherever the package lies.
"""

# On the path of a restore strings and os.path take a fifth of pathlib's time.
# ruff: noqa: PTH113, PTH114
from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping

from kcache.errors import ProbeError
from kcache.values import dataclass

_RULE_PARTS = (
    "_iter_fingerprint_files", "_compute_b12x_package_fingerprint", "_compile_arch_key", "_device_arch_key",
    "_runtime_toolchain_key", "_compile_environment_key", "_static_compile_cache_context", "_device_compile_cache_context",
    "_compile_disk_cache_payload", "_build_compile_disk_cache_key", "_cache_prefix", "_cache_object_path",
    "_cache_manifest_path", "_cache_lock_path", "_cute_compile_cache_dir", "_manifest_json_value",
    "_semantic_compile_manifest_payload", "_build_compile_manifest", "_write_compile_manifest", "_load_cute_compile_from_disk",
)  # fmt: skip
"""What decides about names, places and manifests in `_lib/compiler.py`."""

RULES = ("cec562cd11b6fd79", "647afaaaabafd399")
"""Digests (`rule_digest`) of the texts that `kcache.kinds.b12x_key` and `b12x_compile` know: PyPI's 1.5.1, and the copy in
FlashInfer 0.7.4, which is the same code in other lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class B12xPackage:
    """One b12x package.

    root:        its directory; `_lib/compiler.py` lies below it.
    embedded:    whether it is the copy inside FlashInfer.
    files:       path inside the package -> SHA-256 (hex digits) of its bytes.
    fingerprint: as b12x works it out: 64 hex digits.
    """

    root: str
    embedded: bool
    files: Mapping[str, str]
    fingerprint: str


def find_package(search_path: Iterable[str]) -> tuple[str, bool] | None:
    """Directory of the b12x that `import b12x` gives on this search path, and whether it is FlashInfer's copy; None if none."""
    entries = [path.rstrip("/") or "/" for path in search_path if path]
    first = next((f"{entry}/b12x" for entry in entries if os.path.isfile(f"{entry}/b12x/__init__.py")), None)
    if first is None:
        return None
    if os.path.isfile(f"{first}/_lib/compiler.py"):
        return first, False
    flashinfer = next((f"{entry}/flashinfer" for entry in entries if os.path.isfile(f"{entry}/flashinfer/__init__.py")), None)
    copy = f"{flashinfer}/experimental/b12x"
    if flashinfer is not None and os.path.isfile(f"{copy}/_lib/compiler.py"):
        return copy, True
    return None


def read_package(root: str, *, embedded: bool = False) -> B12xPackage:
    """The files of a package and its fingerprint.

    Raises:
        ProbeError: it cannot be read, or its rule for keys is not one that is known here.
    """
    found = rule_digest(root)
    if found not in RULES:
        raise ProbeError(
            "this b12x names its programs in another way",
            why=f"{root}/_lib/compiler.py has a rule with digest {found}, which this kcache does not know",
            remedy="Use a newer kcache; until then programs are compiled on first use, as without kcache.",
        )
    whole = hashlib.sha256()
    files = {}
    for path in package_paths(root):
        try:
            with open(f"{root}/{path}", "rb") as stream:
                data = stream.read()
        except OSError as error:
            raise ProbeError("a file of b12x cannot be read", why=f"{root}/{path}: {error.strerror}") from error
        files[path] = hashlib.sha256(data).hexdigest()
        whole.update(path.encode() + b"\0" + data + b"\0")
    return B12xPackage(root=root, embedded=embedded, files=files, fingerprint=whole.hexdigest())


def package_paths(root: str) -> list[str]:
    """Every file that b12x hashes, in its order (that of pathlib: by parts)."""
    found = []
    for folder, directories, names in os.walk(root):
        directories[:] = [name for name in directories if name != "__pycache__" and not os.path.islink(f"{folder}/{name}")]
        inside = folder[len(root) + 1 :]
        for name in names:
            if not name.endswith((".pyc", ".pyo")) and os.path.isfile(f"{folder}/{name}"):
                found.append(f"{inside}/{name}" if inside else name)
    return sorted(found, key=lambda path: path.split("/"))


def differing_files(built: Mapping[str, str], host: Mapping[str, str]) -> tuple[str, ...]:
    """The files that make two packages differ, by path inside the package."""
    return tuple(sorted(path for path in {*built, *host} if built.get(path) != host.get(path)))


def rule_digest(root: str) -> str:
    """A digest of b12x's own text of the rule, without its comments and docstrings: sixteen hex digits.

    Raises:
        ProbeError: `_lib/compiler.py` cannot be read.
    """
    path = f"{root}/_lib/compiler.py"
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ProbeError("b12x's rule for keys could not be read", why=f"{path}: {error}") from error
    return hashlib.sha256("\n".join(_function(text, name) for name in _RULE_PARTS).encode()).hexdigest()[:16]


def _function(text: str, name: str) -> str:
    """The lines of a top-level function, without comments, docstring and empty lines; empty if there is none of this name."""
    found = re.search(rf"^def {name}\(.*?(?=^[^\s)]|\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        return ""
    code = re.sub(r'^ *"""(?:[^"]|"(?!""))*"""\n', "", found[0], count=1, flags=re.MULTILINE)
    lines = (re.sub(r"\s+#.*|^\s*#.*", "", line).rstrip() for line in code.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("@"))
