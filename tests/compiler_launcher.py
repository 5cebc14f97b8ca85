"""A compiler launcher, as ccache is one (FLASHINFER_NVCC_LAUNCHER): the real nvcc compiles each source once; its output is kept.

`python -I -S compiler_launcher.py LOG KEEP NVCC ARGUMENTS...`: one line in LOG for each start of a compiler; as many seconds as
KCACHE_TEST_PAUSE says pass before it works, so that a test can come between.
"""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    log, keep, command = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    with log.open("a", encoding="utf-8") as stream:
        stream.write(f"{os.getpid()} {command[-1]}\n")
    time.sleep(float(os.environ.get("KCACHE_TEST_PAUSE", "0")))
    output, depfile = Path(command[command.index("-o") + 1]), Path(command[command.index("-MF") + 1])
    same = " ".join(command).replace(str(output), "OUT").replace(str(output.parent), "HERE")
    same = same.replace(str(output.parents[2]), "BASE")
    kept = keep / hashlib.sha256(same.encode()).hexdigest()[:16]
    if not (kept / "d").exists():
        code = subprocess.run(command, check=False).returncode
        if code:
            return code
        kept.mkdir(parents=True, exist_ok=True)
        for source, name in ((output, "o"), (depfile, "d")):
            text = source.read_bytes().replace(str(output).encode(), b"@OUT@") if name == "d" else source.read_bytes()
            part = kept / f"{name}.{os.getpid()}"
            part.write_bytes(text)
            part.replace(kept / name)
        return 0
    depfile.write_bytes((kept / "d").read_bytes().replace(b"@OUT@", str(output).encode()))
    output.write_bytes((kept / "o").read_bytes())
    return 0


if __name__ == "__main__":
    sys.exit(main())
