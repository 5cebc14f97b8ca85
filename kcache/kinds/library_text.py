"""A library's own text of a rule, so that kcache applies a rule only where it knows that the library has the same one.

A rule that kcache repeats is right for one text of it. Comments, docstrings and decorators decide nothing and are left out.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from kcache.errors import ProbeError


def read_source(path: str, what: str) -> str:
    """The text of a library's source.

    Args:
        what: names the rule in the error.

    Raises:
        ProbeError: it cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ProbeError(f"{what} could not be read", why=f"{path}: {error}") from error


def function_text(text: str, name: str) -> str:
    """The lines of a function, without comments, docstring and empty lines; empty if there is none of this name."""
    found = re.search(rf"^(?P<indent> *)def {name}\(.*?(?=^(?P=indent)\S(?<!\))|\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        return ""
    code = re.sub(r'^ *"""(?:[^"]|"(?!""))*"""\n', "", found[0], count=1, flags=re.MULTILINE)
    lines = [re.sub(r"\s+#.*|^\s*#.*", "", line).rstrip() for line in code.splitlines()]
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("@"))


def digest_of_parts(parts: Iterable[str]) -> str:
    """Sixteen hex digits that name the text of a rule."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
