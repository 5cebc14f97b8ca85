"""Files that other processes, and the dynamic loader, will trust: written whole or not at all, and checked before use.

Invariants:
- A name is only ever given to bytes that are complete, verified and on disk: temporary name in the same directory, fsync,
  rename, fsync of the directory. No rename crosses directories, so a target in a lower overlay layer is no obstacle (B11).
  What is checked whenever it is read, and can be made again, need not be on disk (`durable=False`): no process that is killed
  leaves a part of it, only a power failure may.
- No symbolic link is followed at a name that kcache writes, locks or loads. Links above a cache root are the host's business.
- Modes are exact, whatever the umask.
- `OSError` does not leave this package, except where a caller's own iterator raised it: it becomes an error with a remedy.

Not here: what the files mean, and where they go.
"""

from kcache.fsops.checks import Identity, check_regular, check_root
from kcache.fsops.failures import translated
from kcache.fsops.flushing import Flusher
from kcache.fsops.locking import locked
from kcache.fsops.reading import digest_or_none, read_checked, read_small
from kcache.fsops.space import free_bytes, require_space
from kcache.fsops.writing import (
    DAMAGED_PREFIX,
    TEMPORARY_PREFIX,
    Staged,
    Written,
    ensure_directory,
    make_directory,
    set_aside,
    stage,
    sweep,
    sync_directory,
    write_bytes,
    write_link,
    write_stream,
)

__all__ = [
    "DAMAGED_PREFIX",
    "TEMPORARY_PREFIX",
    "Flusher",
    "Identity",
    "Staged",
    "Written",
    "check_regular",
    "check_root",
    "digest_or_none",
    "ensure_directory",
    "free_bytes",
    "locked",
    "make_directory",
    "read_checked",
    "read_small",
    "require_space",
    "set_aside",
    "stage",
    "sweep",
    "sync_directory",
    "translated",
    "write_bytes",
    "write_link",
    "write_stream",
]
