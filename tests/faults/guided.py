"""One target of `faults.fuzz` under atheris (libFuzzer), in a process of its own, which it ends when the time is over.

python -m faults.guided TARGET SECONDS DIRECTORY     the directory holds `corpus/`, and takes what crashes
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["kcache"]):
    from faults.fuzz import attempt


def main(name: str, seconds: str, directory: str) -> None:
    limits = [f"-max_total_time={seconds}", "-timeout=20", "-rss_limit_mb=2048", "-max_len=20000", "-print_final_stats=1"]
    atheris.Setup(
        [sys.argv[0], *limits, f"-artifact_prefix={directory}/", f"{directory}/corpus"], lambda data: attempt(name, bytes(data))
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
