"""What the exit status of a command says. Part of the command-line contract; documented in README.md."""

DONE = 0
FAILED = 1
USAGE = 2
PARTIAL = 3
MISS = 10
LOCKED = 11
CORRUPT_OR_UNTRUSTED = 12
STOPPED = 130
