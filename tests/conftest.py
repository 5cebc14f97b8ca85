"""Its presence puts `tests/` on the import path, so that every test can say `from entries import make_entry`."""

from __future__ import annotations

import signal

from hypothesis import settings


def pytest_configure() -> None:
    """What beneath a shell's background job or nohup is ignored, and inherited, has its default for tests that send it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    settings.register_profile("kcache", deadline=None)  # others work on this machine too: time is no property of an example
    settings.load_profile("kcache")
