"""b12x MoE kernels of a model, made ready on this process's GPU: each call that the model will make is made once, on zeros.

FlashInfer's own dispatch decides which kernel a call needs, loads it where a restore put it, and compiles it where none is
(`fused_moe/cute_dsl/blackwell_sm12x/moe_dispatch.py`), those that it keeps in memory only among them.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcache.kinds.cute_kinds import CUTE_KINDS
from kcache.warmup.report import BUILT, PRESENT, SKIPPED, ModuleReport
from kcache.warmup.stopping import Stop

if TYPE_CHECKING:
    from kcache.recipe import Recipe

_KIND = CUTE_KINDS["b12x-moe"]


def warm_kernels(name: str, recipe: Recipe, variants: Iterable[str], stop: Stop) -> ModuleReport:
    """Makes the calls of a recipe, each token count once.

    Args:
        variants: only these of the recipe's (`nvfp4-tp1-ep1`); all where empty.

    Raises:
        LateError: the end came between two calls. Exception: what FlashInfer raised.
    """
    import flashinfer
    import torch

    started = time.monotonic()
    if not torch.cuda.is_available():
        reason = "there is no GPU to launch kernels on; `kcache build --manifest` compiles them without one"
        return ModuleReport(name=name, status=SKIPPED, reason=reason)
    if (capability := torch.cuda.get_device_capability()) not in _KIND.capabilities:
        reason = f"this GPU has compute capability {capability[0]}.{capability[1]}, and these kernels are for 12.0 and 12.1"
        return ModuleReport(name=name, status=SKIPPED, reason=reason)
    from kcache.probe.children import b12x_calls
    from kcache.recipe_shapes import dry_run_cases

    wanted = tuple(variants)
    cases = [case for case in dry_run_cases(recipe, flashinfer.__version__) if not wanted or case["variant"] in wanted]
    if not cases:
        return ModuleReport(name=name, status=SKIPPED, reason="this FlashInfer's kernels take none of the recipe's shapes")
    for module in b12x_calls.NEEDS:
        importlib.import_module(module)
    before = _objects()
    with zeros(), torch.device("cuda"):
        for case in cases:
            make_call = b12x_calls.calls(case)
            for tokens in case["tokens"]:
                stop.check()
                make_call(tokens)
                torch.cuda.synchronize()
    return ModuleReport(name=name, status=BUILT if _objects() - before else PRESENT, seconds=time.monotonic() - started)


def _objects() -> set[Path]:
    from flashinfer.jit import env

    return set(Path(env.FLASHINFER_JIT_DIR).glob(f"{_KIND.module}_*/*.o"))


@contextmanager
def zeros() -> Iterator[None]:
    """Within: `torch.empty` gives zeros. Whatever lies in fresh memory is no expert's number, and a kernel would follow it."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Zeros(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **(kwargs or {}))
            if function is torch.empty:
                made.view(torch.uint8).zero_() if made.dim() else made.zero_()
            return made

    with Zeros():
        yield
