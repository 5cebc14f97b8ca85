"""What a start of kcache imports (`python -X importtime`), held to a budget; see `ci/importtime`.

The budget is the set of modules, not their time: it is the same on every machine. A bare interpreter's modules are not counted.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

NEVER = ("torch", "flashinfer", "numpy")
"""On no way at all."""

SLOW = (
    "click",
    "rich",
    "huggingface_hub",
    "cryptography",
    "subprocess",
    "dataclasses",
    "inspect",
    "importlib.metadata",
    "tarfile",
    "kcache.trust",
)
"""Not on the way of a server's start."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to start kcache. `budget`: modules that it may import; `forbidden`: and their submodules."""

    words: tuple[str, ...]
    budget: int
    forbidden: tuple[str, ...]


WAYS = {
    "import kcache": Way(words=("-c", "import kcache"), budget=1, forbidden=(*NEVER, *SLOW)),
    "kcache restore, from a directory that has nothing": Way(
        words=("-m", "kcache", "restore", "--from", "{store}", "--arch", "9.0a"), budget=130, forbidden=(*NEVER, *SLOW)
    ),
    "kcache --help": Way(
        words=("-m", "kcache", "--help"), budget=105, forbidden=(*NEVER, "rich", "huggingface_hub", "cryptography")
    ),
}


@dataclass(frozen=True, kw_only=True)
class Import:
    """One line of `-X importtime`, in the order in which imports ended. Microseconds; `depth` 0 is what the program named."""

    module: str
    depth: int
    own: int
    total: int


def imports(words: tuple[str, ...], home: Path) -> list[Import]:
    """What a fresh interpreter imports for these words."""
    environ = {"HOME": str(home), "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-X", "importtime", *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    found = []
    for line in done.stderr.splitlines():
        parts = line.removeprefix("import time:").split("|")
        if line.startswith("import time:") and parts[0].strip().isdigit():
            name = parts[2].rstrip()
            module = name.strip()
            depth = (len(name) - len(name.lstrip()) - 1) // 2
            found.append(Import(module=module, depth=depth, own=int(parts[0]), total=int(parts[1])))
    return found


def exceeded(way: Way, found: list[Import]) -> list[str]:
    """In what a way is over its budget, one sentence each."""
    modules = [one.module for one in found]
    wrong = [name for name in modules if any(name == one or name.startswith(f"{one}.") for one in way.forbidden)]
    said = [f"imports {name}, which is not for this way: import it where it is used" for name in wrong]
    if len(modules) > way.budget:
        said.append(f"imports {len(modules)} modules, and its budget is {way.budget} (WAYS in ci/importtime.py)")
    return said


def tree(found: list[Import]) -> str:
    """The imports as a tree, with what each took in milliseconds with all below it, and on its own."""
    lines: list[str] = []
    for one in reversed(found):  # a line of importtime comes after those of what it imported
        lines.append(f"{one.total / 1000:8.1f} {one.own / 1000:8.1f}  {'  ' * one.depth}{one.module}")
    return "\n".join(["      ms      own", *lines])


def main() -> None:
    bad = False
    with tempfile.TemporaryDirectory() as name:
        store = Path(name, "store")
        (store / "index").mkdir(parents=True)
        bare = {one.module for one in imports(("-c", "pass"), Path(name))}
        for title, way in WAYS.items():
            words = tuple(word.format(store=store) for word in way.words)
            found = [one for one in imports(words, Path(name)) if one.module not in bare]
            took = sum(one.own for one in found) / 1000
            print(f"{title}: {len(found)} modules of {way.budget}, {took:.0f} ms")
            if "--tree" in sys.argv:
                print(tree(found))
            for line in exceeded(way, found):
                print(f"  {line}")
                bad = True
    sys.exit(bad)


if __name__ == "__main__":
    main()
