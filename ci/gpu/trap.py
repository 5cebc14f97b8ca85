"""In front of a compiler or ninja: `python -I -S trap.py LOG COMMAND...` runs it, and writes down when it ran."""

import json
import os
import subprocess
import sys
import time


def main() -> int:
    log, command = sys.argv[1], sys.argv[2:]
    began = time.time()
    code = subprocess.call(command)
    line = json.dumps({"program": os.path.basename(command[0]), "last": command[-1], "began": began, "ended": time.time()})  # noqa: PTH119
    with open(log, "a", encoding="utf-8") as stream:
        stream.write(line + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
