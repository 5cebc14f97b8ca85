"""How restored nvcc modules are offered to FlashInfer: a view, and the rules by which FlashInfer will take it.

A view is an immutable directory `site/<id>/` whose one package, `flashinfer_jit_cache`, names the restored entries. It is put
first on PYTHONPATH. Its id is the digest of its content, so views are never changed, only made. Pure functions and values here;
`kcache.workflows.install` does the writing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from kcache import digest
from kcache.values import dataclass

PACKAGE = "flashinfer_jit_cache"
DESCRIPTION = "kcache.json"
"""The file that marks a package as ours; `kcache.kinds.jit_cache_shim` reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvidedEntry:
    """One installed entry that a view names.

    directory: absolute; holds `<module>/<module>.so`.
    arch:      FlashInfer's spelling, such as `90a`.
    """

    fingerprint: str
    directory: str
    arch: str
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The content of a view: relative path -> bytes of regular files, and relative path -> target of symbolic links."""

    files: Mapping[str, bytes]
    links: Mapping[str, str]

    @property
    def id(self) -> str:
        """Sixteen hex digits that name the content."""
        document = {path: digest.of_bytes(data) for path, data in self.files.items()} | dict(self.links)
        return digest.of_document(document).removeprefix("sha256:")[:16]


def uses_providers(flashinfer_version: str) -> bool:
    """Whether this FlashInfer asks `get_jit_cache_providers()` (0.7.0 and later) or `get_jit_cache_dir()` (up to 0.6.18)."""
    match = re.match(r"([0-9]+)\.([0-9]+)", flashinfer_version)
    return match is None or (int(match[1]), int(match[2])) >= (0, 7)


def make_view(entries: Sequence[ProvidedEntry], flashinfer_version: str, real_modules: Mapping[str, str]) -> View:
    """The view for these entries.

    Args:
        entries: installed entries, at most one for each module and architecture.
        real_modules: module -> path of its library in an installed real `flashinfer_jit_cache`, needed only for FlashInfer
            before 0.7, which looks into a single directory.
    """
    ordered = sorted(entries, key=lambda entry: entry.fingerprint)
    description = {
        "flashinfer_version": flashinfer_version,
        "providers": [
            {
                "id": f"kcache-{entry.fingerprint.removeprefix('sha256:')[:16]}",
                "directory": entry.directory,
                # FlashInfer's spelling for providers has the prefix (jit/_cuda_architecture.py, parse_cuda_architecture).
                "cuda_architectures": [f"sm{entry.arch}"],
                "modules": list(entry.modules),
            }
            for entry in ordered
        ],
    }
    shim = Path(__file__).with_name("jit_cache_shim.py").read_bytes()
    files = {f"{PACKAGE}/__init__.py": shim, f"{PACKAGE}/{DESCRIPTION}": digest.canonical_json(description)}
    links: dict[str, str] = {}
    if not uses_providers(flashinfer_version):
        links = {f"{PACKAGE}/jit_cache/{module}/{module}.so": target for module, target in sorted(real_modules.items())}
        for entry in ordered:
            for module in entry.modules:
                links[f"{PACKAGE}/jit_cache/{module}/{module}.so"] = f"{entry.directory}/{module}/{module}.so"
    return View(files=files, links=links)


def python_path(current: str, site: str, view: str) -> str:
    """PYTHONPATH with one view of `site` first and every other view of it removed.

    Args:
        current: the value in force, may be empty.
        site: the absolute directory that holds views.
        view: the absolute directory of the view to use.
    """
    kept = [part for part in current.split(":") if part and Path(part).parent != Path(site)]
    return ":".join([view, *kept])


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Whether FlashInfer, by its own rules, will load a module from a restored entry.

    served_by: `kcache`, or what FlashInfer takes instead; empty if nothing does.
    """

    module: str
    accepted: bool
    served_by: str
    reason: str = ""


def acceptance(
    module: str,
    *,
    flashinfer_version: str,
    shadowing: str | None,
    library_in_place: bool,
    archs: Sequence[str],
    served: Sequence[str],
) -> Acceptance:
    """Applies FlashInfer's rules (flashinfer/jit/env.py, get_aot_artifacts, 0.7.4; _get_aot_dir, 0.6.18) to one module.

    Args:
        shadowing: path of `<flashinfer>/data/aot/<module>/<module>.so` if there is one.
        library_in_place: whether the installed file has the size and identity that its receipt states.
        archs: the environment's architectures.
        served: those that the restored entries serve.
    """
    if not library_in_place:
        return Acceptance(module=module, accepted=False, served_by="", reason="the library is not in place")
    if shadowing is not None and uses_providers(flashinfer_version):
        reason = f"FlashInfer {flashinfer_version} takes {shadowing} first; it is loaded without a freshness check"
        return Acceptance(module=module, accepted=False, served_by="flashinfer/data/aot", reason=reason)
    missing = [arch for arch in archs if arch not in served]
    if missing:
        return Acceptance(
            module=module, accepted=False, served_by="kcache", reason=f"nothing for the GPU architecture {', '.join(missing)}"
        )
    if not uses_providers(flashinfer_version) and len(archs) > 1:
        reason = f"FlashInfer {flashinfer_version} looks into one directory, which cannot serve several architectures"
        return Acceptance(module=module, accepted=False, served_by="", reason=reason)
    return Acceptance(module=module, accepted=True, served_by="kcache")
