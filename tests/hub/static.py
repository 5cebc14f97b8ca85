"""A plain static file server on loopback, as a mirror is one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class _Quiet(SimpleHTTPRequestHandler):
    """Python's own: no ranges, no ETag, a connection for each request. The least that a mirror can be."""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def list_directory(self, path: Any) -> None:
        self.send_error(404)


@contextmanager
def static_site(root: Path) -> Iterator[str]:
    """The address under which a directory is served."""
    root.mkdir(parents=True, exist_ok=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *words: _Quiet(*words, directory=str(root)))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
