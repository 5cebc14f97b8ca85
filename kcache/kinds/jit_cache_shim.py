"""The package `flashinfer_jit_cache` as kcache provides it. kcache copies this file into a view; do not edit the copy.

Runs inside the server, while FlashInfer is imported: standard library only, and it must never be the reason that a server does
not start. `kcache.json` beside it says which modules were restored. FlashInfer 0.7 and later ask `get_jit_cache_providers()`
(flashinfer/jit/env.py, _get_aot_providers), versions up to 0.6.18 ask `get_jit_cache_dir()` (_get_aot_dir).

A real `flashinfer_jit_cache` that is installed as well goes on serving its modules. FlashInfer 0.7 ignores a provider whose
version differs from the package's own `__version__` (_check_jit_cache_provider_version), so where a real one is taken along,
its version becomes ours.
"""

import importlib.machinery
import importlib.util
import json
import logging
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (no pathlib: the server pays for each import)
_LOG = logging.getLogger("kcache")

with open(os.path.join(_HERE, "kcache.json"), encoding="utf-8") as _stream:  # noqa: PTH118
    _VIEW: dict[str, Any] = json.load(_stream)


def _find_real() -> ModuleType | None:
    """The installed package of this name behind ours on sys.path, loaded under another name; None if there is none."""
    ours = os.path.dirname(_HERE)  # noqa: PTH120
    path = [entry for entry in sys.path if os.path.realpath(entry or ".") != os.path.realpath(ours)]
    spec = importlib.machinery.PathFinder.find_spec("flashinfer_jit_cache", path)
    if spec is None or spec.origin is None or spec.submodule_search_locations is None:
        return None
    if os.path.exists(os.path.join(os.path.dirname(spec.origin), "kcache.json")):  # noqa: PTH110, PTH118, PTH120
        return None  # another view of ours
    name = "flashinfer_jit_cache_behind_kcache"
    locations = list(spec.submodule_search_locations)
    alias = importlib.util.spec_from_file_location(name, spec.origin, submodule_search_locations=locations)
    if alias is None or alias.loader is None:
        return None
    module = importlib.util.module_from_spec(alias)
    sys.modules[name] = module
    # Code of the real package that imports its own submodules by their full name finds them here.
    search = sys.modules[__name__].__path__
    search.extend(locations)
    try:
        alias.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        for location in locations:
            search.remove(location)
        raise
    return module


def _usable(module: ModuleType) -> bool:
    """Whether FlashInfer itself would take the real package: its rule in flashinfer/jit/env.py, _check_jit_cache_version."""
    wanted, found = str(_VIEW["flashinfer_version"]), str(module.__version__)
    if os.environ.get("FLASHINFER_DISABLE_VERSION_CHECK") or found == wanted or found.startswith(wanted + "+"):
        return True
    _LOG.warning(
        "flashinfer-jit-cache %s is installed beside FlashInfer %s and left out: install the same version", found, wanted
    )
    return False


try:
    _REAL = _find_real()
    if _REAL is not None and not _usable(_REAL):
        _REAL = None
except Exception:  # noqa: BLE001 (a server's start is at stake)
    _LOG.warning("the installed flashinfer-jit-cache does not load; serving restored modules alone", exc_info=True)
    _REAL = None

__version__: str = str(_REAL.__version__) if _REAL is not None else str(_VIEW["flashinfer_version"])


def get_jit_cache_providers() -> tuple[Any, ...]:
    """Restored entries, one provider each, then the providers of a real package behind this one."""
    providers: list[Any] = [
        SimpleNamespace(
            provider_id=entry["id"],
            distribution="kcache",
            version=__version__,
            jit_cache_dir=entry["directory"],
            cuda_architectures=frozenset(entry["cuda_architectures"]),
            modules=frozenset(entry["modules"]),
        )
        for entry in _VIEW["providers"]
    ]
    if _REAL is not None:
        try:
            providers.extend(_REAL.get_jit_cache_providers())
        except Exception:  # noqa: BLE001 (a server's start is at stake)
            _LOG.warning("the installed flashinfer-jit-cache names no providers; serving restored modules alone", exc_info=True)
    return tuple(providers)


def get_jit_cache_dir() -> str:
    """One directory with every module, restored or of the real package (linked when kcache made the view)."""
    return os.path.join(_HERE, "jit_cache")  # noqa: PTH118


def __getattr__(name: str) -> Any:
    if _REAL is not None:
        return getattr(_REAL, name)
    raise AttributeError(f"module 'flashinfer_jit_cache' (of kcache) has no attribute {name!r}")
