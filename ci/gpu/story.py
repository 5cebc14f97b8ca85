"""The whole story on a GPU host: `python ci/gpu/story.py STORE OUT`, with kcache, FlashInfer, torch and nvcc in this environment.

STORE holds `sampling`, `topk`, `gdn-decode` and `gdn-verify` for this GPU, built and published on a host without one. A server
(`serve.py`) is started cold, then with a warm-up, then behind `kcache restore`; every compiler and ninja is written down, and so
are FlashInfer's own builds. After that come `kcache verify`, all public sampling functions, and the CuTe-DSL kernels of `gdn.py`,
restored (FLASHINFER_DISABLE_JIT=1), against the cold build's.
OUT gets `story.json`. Each step has its own end, and one that fails is told and does not stop the next.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class Host:
    """One home with its caches, in which commands run."""

    def __init__(self, top: Path, name: str) -> None:
        self.home = top / name
        self.home.mkdir(parents=True)
        tools = self.home / "bin"
        tools.mkdir()
        self.trapped, self.builds = self.home / "trapped.jsonl", self.home / "builds.jsonl"
        trap = f"{sys.executable} -I -S {HERE}/trap.py {self.trapped}"
        if (ninja := shutil.which("ninja")) is not None:
            (tools / "ninja").write_text(f'#!/bin/sh\nexec {trap} {ninja} "$@"\n')
            (tools / "ninja").chmod(0o755)
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHINFER_", "KCACHE_"))}
        self.environ |= {
            "HOME": str(self.home),
            "PATH": f"{tools}:{os.environ['PATH']}",
            "FLASHINFER_NVCC_LAUNCHER": trap,
            "FLASHINFER_JIT_BUILD_LOG": str(self.builds),
        }

    def run(self, command: list[str], limit: float, **environ: str) -> dict[str, Any]:
        """Runs a command; how it ended, how long it took, the end of what it said."""
        started = time.time()
        variables = {**self.environ, **environ, "SERVE_LAUNCHED": str(started)}
        try:
            done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=limit, check=False)
            code, said, out = done.returncode, done.stderr[-1500:], done.stdout
        except subprocess.TimeoutExpired:
            code, said, out = -1, f"more than {limit:g} s", ""
        print(f"{' '.join(command)[-90:]}: {code} after {time.time() - started:.1f} s", file=sys.stderr, flush=True)
        return {
            "code": code,
            "launched": started,
            "seconds": round(time.time() - started, 3),
            "stderr": said,
            "stdout": out[-20000:],
        }

    def lines(self, path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def served(host: Host, mode: str, *prefix: str, limit: float) -> dict[str, Any]:
    """One server's life: its timeline, with builds and compilers in seconds since the launch."""
    out = host.home / f"{mode}.json"
    done = host.run([*prefix, sys.executable, str(HERE / "serve.py"), str(out), "--mode", mode], limit)
    timeline: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"mode": mode, "failed": done}
    launched = done["launched"]
    timeline["builds"] = [
        {"name": build["name"], "ended": round(build["time"] - launched, 3), "seconds": build["seconds"]}
        for build in host.lines(host.builds)
    ]
    timeline["compilers"] = [
        {
            "program": run["program"],
            "what": Path(run["last"]).name,
            "began": round(run["began"] - launched, 3),
            "ended": round(run["ended"] - launched, 3),
        }
        for run in host.lines(host.trapped)
    ]
    return timeline


def checked(
    host: Host, name: str, *prefix: str, words: tuple[str, ...] = (), jit: bool = True, limit: float = 60
) -> dict[str, Any]:
    out = host.home / f"{name}.json"
    environ = {} if jit else {"FLASHINFER_DISABLE_JIT": "1"}
    done = host.run([*prefix, sys.executable, str(HERE / f"{name}.py"), str(out), *words], limit, **environ)
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"failed": done}
    return found


def main() -> int:
    store, out = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    top = out.parent / f"{out.name}-work" if len(sys.argv) < 4 else Path(sys.argv[3])
    shutil.rmtree(top, ignore_errors=True)
    kcache = [sys.executable, "-m", "kcache"]
    story: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "python": sys.version.split()[0]}

    def keep() -> None:
        (out / "story.json").write_text(json.dumps(story))

    restored = Host(top, "restored")
    restore = [*kcache, "restore", "--from", str(store), "--deadline", "60s", "--json"]
    first = restored.run(restore, 90)
    story["restore"] = {"seconds": first["seconds"], "report": _json(first["stdout"]), "stderr": first["stderr"]}
    wiped = Host(top, "served")
    story["restored"] = served(wiped, "restored", *restore[:-1], "--", limit=120)
    keep()
    proof = restored.run([*kcache, "verify", "--json"], 90)
    story["verify"] = _json(proof["stdout"]) or proof
    story["check_restored"] = checked(restored, "check", *restore[:-1], "--", jit=False)
    story["first_sample"] = checked(restored, "first_sample", *restore[:-1], "--", jit=False)
    story["gdn_restored"] = checked(restored, "gdn", *restore[:-1], "--", jit=False)
    story["compilers_of_checks"] = len(restored.lines(restored.trapped))
    keep()
    cold = Host(top, "cold")
    story["gdn_cold"] = checked(Host(top, "cold-kernels"), "gdn", limit=200)
    story["cold"] = served(cold, "cold", limit=200)
    story["check_cold"] = checked(cold, "check", words=("--without-topk",))
    keep()
    warm = Host(top, "warmup")
    story["warmup"] = served(warm, "warmup", limit=200)
    keep()
    equal = story["check_cold"].get("results", {})
    again = story["check_restored"].get("results", {})
    story["equal"] = sorted(name for name in equal if equal[name] == again.get(name))
    story["different"] = sorted(name for name in equal if equal[name] != again.get(name))
    keep()
    return 0


def _json(text: str) -> Any:
    begin = text.find("{")
    try:
        return json.JSONDecoder().raw_decode(text[begin:])[0] if begin >= 0 else None
    except ValueError:
        return None


if __name__ == "__main__":
    sys.exit(main())
