"""Where engines keep FlashInfer's tuning results. Pure: paths from variables.

Each rule names what was read of the engine. None of them can be run here; each is held by a test to the paths that its source
spells. FlashInfer's own managed store is `kcache.kinds.autotune_v2.store_root`.

- vLLM: `<root>/<hash of the configuration>/autotune_configs.json`; with pipeline parallelism a file for each stage,
  `autotune_configs_tp_<ranks>.json`, ranks joined by `-`. Read: vllm-project/vllm (commit 0f17ee06),
  `model_executor/warmup/flashinfer_autotune_cache.py`; pull request 57198 and the tests that came of it.
- SGLang: `<root>/<FlashInfer version>/sm<major><minor>/<hash of the model>/rank_tp<r>_pp<r>_dp<r>.json`, a file for each
  rank. Read: `flashinfer_autotune_cache_path` and `SGLANG_CACHE_DIR` in `sglang/srt/environ.py`.
- TensorRT-LLM: nothing of FlashInfer's. `TLLM_AUTOTUNER_CACHE_PATH` names a file of its own tuner, in its own format
  (`metadata`, `cache_data`). Read: NVIDIA/TensorRT-LLM, `tensorrt_llm/_torch/autotuner.py`, AutoTunerProfilingCache.

The hash of a configuration or model is the engine's; kcache keeps the path below the root as it was collected, and restores to
the same path below the target's root. All ranks of a group must find the same bytes: where each has a file of its own, that is
a matter of `kcache.kinds.autotune.group_may_use`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

VLLM_FILE = "autotune_configs.json"

TENSORRT_LLM = (
    "TensorRT-LLM tunes with its own tuner and keeps the results in its own format, at TLLM_AUTOTUNER_CACHE_PATH: "
    "nothing of FlashInfer's is looked for there"
)
"""One line for the report."""


def vllm_root(environ: Mapping[str, str], *, flashinfer_version: str, archs: str) -> str:
    """The directory below which vLLM keeps a folder for each configuration.

    Args:
        environ: of the server. An override is used as it is, without version and architectures.
        archs: the name of FlashInfer's workspace directory, such as `90a` or `120f_121a`.
    """
    home = environ.get("HOME", "")
    if override := environ.get("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"):
        return _expanded(override, home)
    cache = environ.get("VLLM_CACHE_ROOT") or f"{environ.get('XDG_CACHE_HOME') or f'{home}/.cache'}/vllm"
    return f"{_expanded(cache, home)}/flashinfer_autotune_cache/{flashinfer_version}/{archs}"


def vllm_file(config_hash: str, ranks: Sequence[int] = ()) -> str:
    """The path of one file below vLLM's root.

    Args:
        config_hash: vLLM's digest of its configuration.
        ranks: the global ranks of the pipeline stage; empty without pipeline parallelism.
    """
    name = VLLM_FILE if not ranks else f"autotune_configs_tp_{'-'.join(map(str, ranks))}.json"
    return f"{config_hash}/{name}"


_VLLM_PATH = re.compile(r"([0-9a-f]{64})/autotune_configs(?:_tp_([0-9]+(?:-[0-9]+)*))?\.json")


def parse_vllm_path(path: str) -> tuple[str, tuple[int, ...]] | None:
    """(configuration's hash, ranks) of a path below vLLM's root; None for anything else, such as a rank's scratch file."""
    found = _VLLM_PATH.fullmatch(path)
    return (found[1], tuple(map(int, found[2].split("-"))) if found[2] else ()) if found else None


def sglang_root(environ: Mapping[str, str]) -> str:
    """The directory below which SGLang keeps its files."""
    home = environ.get("HOME", "")
    return f"{environ.get('SGLANG_CACHE_DIR') or f'{home}/.cache/sglang'}/flashinfer/autotune"


def sglang_file(*, flashinfer_version: str, capability: tuple[int, int], model_hash: str, tp: int, pp: int, dp: int) -> str:
    """The path of one rank's file below SGLang's root."""
    return f"{flashinfer_version}/sm{capability[0]}{capability[1]}/{model_hash}/rank_tp{tp}_pp{pp}_dp{dp}.json"


_SGLANG_PATH = re.compile(r"([^/]+)/sm([0-9]+)([0-9])/([0-9a-f]{16})/rank_tp([0-9]+)_pp([0-9]+)_dp([0-9]+)\.json")


def parse_sglang_path(path: str) -> tuple[str, tuple[int, int, int]] | None:
    """(the group: all but the file, (tp, pp, dp)) of a path below SGLang's root; None for anything else, such as `runs/`."""
    found = _SGLANG_PATH.fullmatch(path)
    return (path.rpartition("/")[0], (int(found[5]), int(found[6]), int(found[7]))) if found else None


def _expanded(path: str, home: str) -> str:
    return home + path[1:] if home and (path == "~" or path.startswith("~/")) else path
