"""Tuning on a GPU host, from cold to replayed elsewhere: `python ci/gpu/tune.py STORE OUT WORK MANIFEST...`.

kcache and FlashInfer are in this environment (SITE names their directory), and nothing is compiled by nvcc: STORE holds the
modules that tuning and the operations need, built and published on a host without a GPU. For each build manifest: `kcache build
--kinds autotune`, cold; the entries published beside the modules; restored into an empty home, and into one whose Python finds
the same packages at another path, as another installer would have left them. There FlashInfer replays the calls, from its managed
store (v2) and from vLLM's file (v1), and what it profiled is counted. Then: tuned again, with the better one kept; and a host
that lacks the tuner's module. OUT gets `tune.json` after each step. Each step has its own end, and one that fails is told and
does not stop the next.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kcache
from kcache.recipe import read_recipe
from kcache.recipe_tuning import all_calls

CHILDREN = Path(kcache.__file__).parent / "probe" / "children"
KCACHE = [sys.executable, "-m", "kcache"]


class Home:
    """A home directory with nothing in it, and what runs in it."""

    def __init__(self, top: Path, name: str, **environ: str) -> None:
        self.home = top / name
        self.home.mkdir(parents=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHINFER_", "KCACHE_", "VLLM_"))}
        self.environ = {**kept, "HOME": str(self.home), "FLASHINFER_DISABLE_JIT": "1", **environ}

    def run(self, command: list[str], limit: float, given: str = "") -> dict[str, Any]:
        """Runs a command; how it ended, how long it took, what it said."""
        started = time.time()
        try:
            done = subprocess.run(
                command, env=self.environ, input=given, capture_output=True, text=True, timeout=limit, check=False, cwd=self.home
            )
            code, out, said = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as late:
            code, out = -1, ""
            said = f"more than {limit:g} s: {late.stderr[-2000:] if late.stderr else ''!r}"
        took = round(time.time() - started, 3)
        print(f"{self.home.name}: {' '.join(command)[:110]}: {code} after {took} s", file=sys.stderr, flush=True)
        said = said if len(said) <= 3000 else f"{said[:1000]} ... {said[-2000:]}"
        return {"code": code, "seconds": took, "stdout": _json(out), "stderr": said}

    def behind(self, store: Path, command: list[str], limit: float, given: str = "") -> dict[str, Any]:
        """Runs a command behind `kcache restore`."""
        return self.run([*KCACHE, "restore", "--from", str(store), "--deadline", "60s", "--", *command], limit, given)


def replay(home: Home, store: Path, calls: list[dict[str, Any]], layout: str) -> dict[str, Any]:
    """What FlashInfer does with restored results, in a new process behind `kcache restore`: hits, misses, profiled candidates."""
    answer = home.home / f"{layout}.json"
    files = sorted(str(path) for path in home.home.glob(".cache/vllm/**/autotune_configs*.json"))
    request = {
        "stores": [{"root": None, "policy": {}, "keys": []}] if layout == "v2" else [],
        "files": files if layout == "v1" else [],
        "calls": [{**call, "m": count} for call in calls for count in (call["m"], *call["covers"])],
        "describe": None,
        "answer": str(answer),
    }
    done = home.behind(store, [sys.executable, str(CHILDREN / "autotune_replay.py")], 240, json.dumps(request))
    if not answer.exists():
        return done
    said = json.loads(answer.read_text())
    kept = {name: said[name] for name in ("counted", "coverage", "stores", "files", "seconds")}
    errors = [call.get("error", call.get("relative_error")) for call in said["calls"]]
    return {**kept, "errors": errors, "code": done["code"], "whole_seconds": done["seconds"], "stderr": done["stderr"]}


def elsewhere(site: Path, place: Path) -> Path:
    """The same packages at another path, CuTe-DSL's compiler as another installer would have left it: a line more in RECORD."""
    shutil.copytree(site, place, copy_function=os.link)
    for record in place.glob("nvidia_cutlass_dsl_libs_core-*.dist-info/RECORD"):
        text = record.read_text()
        record.unlink()
        record.write_text(f"{text}nvidia_cutlass_dsl/__pycache__/x.cpython-312.pyc,,\n")
    return place


@dataclass
class Steps:
    """One manifest's steps: what is told of them, where they work, and how it is kept."""

    told: dict[str, Any]
    top: Path
    modules: Path
    manifest: Path
    keep: Callable[[], None]


def story(steps: Steps) -> None:
    """One manifest, from cold to replayed."""
    told, top, modules, manifest, keep = steps.told, steps.top, steps.modules, steps.manifest, steps.keep
    calls = list(all_calls(read_recipe(str(manifest))))
    farm, entries, store = Home(top, "farm"), top / "entries", top / "store"
    build = [*KCACHE, "build", "--kinds", "autotune", "--manifest", str(manifest), "-o", str(entries), "--json"]
    told["tune"] = farm.behind(modules, build, 480)
    told["tuned"] = provenances(entries)
    keep()
    shutil.copytree(modules, store)
    told["publish"] = farm.run([*KCACHE, "publish", str(entries), "--to", str(store), "--json"], 60)
    server = Home(top, "server")
    (server.home / ".cache" / "vllm").mkdir(parents=True)
    told["restore"] = server.run([*KCACHE, "restore", "--from", str(store), "--json"], 60)
    site = Path(os.environ["SITE"])
    there = elsewhere(site, top / "another" / "site")
    moved = Home(top, "moved", PYTHONPATH=os.environ["PYTHONPATH"].replace(str(site), str(there)))
    (moved.home / ".cache" / "vllm").mkdir(parents=True)
    for name, home in (("replay", server), ("relocated", moved)):
        for layout in ("v2", "v1"):
            told[f"{name} {layout}"] = replay(home, store, calls, layout)
            keep()


def again(steps: Steps) -> None:
    """The same farm tunes once more, and a host without the tuner's module tries."""
    told, top, modules, manifest = steps.told, steps.top, steps.modules, steps.manifest
    entries = top / "entries"
    build = [*KCACHE, "build", "--kinds", "autotune", "--manifest", str(manifest), "--json"]
    told["again"] = Home(top, "farm-again").behind(modules, [*build, "-o", str(entries), "--retune"], 200)
    told["compared"] = provenances(entries)
    told["without the tuner's module"] = Home(top, "lacking").run([*build, "-o", str(top / "lacking-entries")], 120)


def provenances(entries: Path) -> list[Any]:
    """What entries say of their tuning."""
    return [json.loads(path.read_text()).get("provenance", {}).get("tuning") for path in sorted(entries.glob("*.json"))]


def main() -> int:
    modules, out, work = (Path(word).resolve() for word in sys.argv[1:4])
    out.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"kcache": kcache.__file__, "stories": {}}

    def keep() -> None:
        (out / "tune.json").write_text(json.dumps(document, default=repr))

    for number, word in enumerate(sys.argv[4:]):
        top = work / f"{number}-{Path(word).stem}"
        shutil.rmtree(top, ignore_errors=True)
        top.mkdir(parents=True)
        told: dict[str, Any] = {}
        document["stories"][Path(word).stem] = told

        manifest = Path(word).resolve()
        for step in (story, again):
            try:
                step(Steps(told=told, top=top, modules=modules, manifest=manifest, keep=keep))
            except Exception as error:  # the next is still tried  # noqa: BLE001
                told.setdefault("failed", []).append(f"{type(error).__name__}: {error}"[:1000])
            keep()
        print(json.dumps({Path(word).stem: verdict(told)}, indent=1))
    return 0


def verdict(told: Mapping[str, Any]) -> dict[str, Any]:
    """What a person wants to see first."""
    tuned = [one for one in told.get("tuned") or [] if one]
    document = told.get("tune", {}).get("stdout") or {}
    found: dict[str, Any] = {
        "status": document.get("status"),
        "reasons": [one.get("reason") for one in document.get("entries", []) if one.get("reason")],
        "cold seconds": [one.get("seconds") for one in tuned][:1],
        "profiled": [one.get("profiled") for one in tuned][:1],
        "restored": (told.get("restore", {}).get("stdout") or {}).get("status"),
    }
    for name in ("replay v2", "replay v1", "relocated v2", "relocated v1"):
        said = told.get(name) or {}
        counted = said.get("counted") or {}
        found[name] = {part: counted.get(part) for part in ("hits", "misses", "profiled")} | {"errors": said.get("errors")}
    found["compared"] = [one.get("compared") for one in told.get("compared") or [] if one]
    lacking = (told.get("without the tuner's module", {}).get("stdout") or {}).get("entries", [])
    found["without the tuner's module"] = [one.get("reason", "")[:160] for one in lacking]
    return found


def _json(text: str) -> Any:
    begin = text.find("{")
    try:
        return json.JSONDecoder().raw_decode(text[begin:])[0] if begin >= 0 else text[-2000:]
    except ValueError:
        return text[-2000:]


if __name__ == "__main__":
    sys.exit(main())
