"""Its presence puts `tests/` on the import path, so that every test can say `from entries import make_entry`."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """A shell lets its background jobs ignore SIGINT, nohup SIGHUP, and children inherit it: tests that send them need the default."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
