"""FlashInfer's attention modules by name: their generators take arguments, and the names say which. Beside flashinfer_specs.py.

`jit/attention/modules.py` (0.6.18 to 0.7.4) makes names of arguments (`get_single_decode_uri` and its like); here arguments are
read out of a name again. A guess costs nothing: whether it was right is seen from the name of the module that the generator
makes. Generators that take a user's own code (`gen_customize_*`) are not tried: no name says what that code is.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

_PARAMETERS = {
    "posenc": "pos_encoding_mode",
    "use_swa": "use_sliding_window",
    "use_logits_cap": "use_logits_soft_cap",
    "f16qk": "use_fp16_qk_reduction",
    "profiler": "use_profiler",
}
"""What a name calls a parameter, where that is not the parameter's own name."""

_TOKEN = re.compile(
    r"(?<=_)(dtype_(?:q|kv|o|idx)|head_dim(?:_qk|_vo|_ckv|_kpe)?|posenc|use_swa|use_logits_cap|use_logits_soft_cap|f16qk"
    r"|(?:use_)?profiler)(_[pd])?_(fp4x2_e2m1|fp4_e2m1|[a-z]+[0-9][a-z0-9]*|[0-9]+|True|False|true|false)(?=_|$)"
)


def arguments(name: str) -> dict[str, Any]:
    """The arguments that a module's name holds: dtypes as their names in it, the others as numbers and truth values."""
    found: dict[str, Any] = {"backend": "fa3" if name.endswith("_sm90") else "fa2", "use_token_head_sf": "_token_head_sf" in name}
    for token, part, value in _TOKEN.findall(name):
        parameter = _PARAMETERS.get(token, token) + part
        if value.lower() in ("true", "false"):
            found[parameter] = value.lower() == "true"
        else:
            found[parameter] = int(value) if value.isdigit() else value
    return found


def candidates(names: list[str]) -> dict[str, dict[str, Callable[[], Any]]]:
    """Calls that may make these modules: module -> generator -> function."""
    made: dict[str, dict[str, Callable[[], Any]]] = {}
    wanted = {name: given for name in names if "dtype_q" in (given := arguments(name))}
    if not wanted:
        return made
    attention = importlib.import_module("flashinfer.jit.attention.modules")
    dtypes = {text: dtype for dtype, text in importlib.import_module("flashinfer.jit.utils").filename_safe_dtype_map.items()}
    dtypes.setdefault("fp4x2_e2m1", dtypes.get("fp4_e2m1"))
    for name, read in wanted.items():
        given = {key: dtypes.get(value) if key.startswith("dtype_") else value for key, value in read.items()}
        for generator, function in vars(attention).items():
            if generator.startswith(f"gen_{name.partition('_')[0]}_") and generator.endswith("_module"):
                parameters = inspect.signature(function).parameters
                if {p.name for p in parameters.values() if p.default is p.empty} <= set(given):
                    used = {key: value for key, value in given.items() if key in parameters}
                    made.setdefault(name, {})[generator] = functools.partial(function, **used)
    return made
