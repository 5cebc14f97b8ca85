"""Connections: a name to addresses, an address to a socket, a socket to TLS, each within limits of time."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path

from kcache.errors import StoreError, UnavailableError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    _AddressInfo = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]


class Patience:
    """How long to wait, in seconds.

    connect: for a name, for a connection, for TLS, each.
    silence: for the next byte, and for the headers as a whole.
    until:   a moment of the monotonic clock after which nothing is waited for.
    """

    __slots__ = ("connect", "silence", "until")

    def __init__(self, *, connect: float = 5.0, silence: float = 10.0, until: float = float("inf")) -> None:
        self.connect, self.silence, self.until = connect, silence, until

    def left(self, limit: float, where: str) -> float:
        """At most `limit`, and what is left.

        Raises:
            UnavailableError: nothing is left.
        """
        left = self.until - time.monotonic()
        if left <= 0:
            raise UnavailableError(f"{where} took longer than the time that was allowed", remedy="Raise --deadline.")
        return min(limit, left)


def connected(host: str, port: int, patience: Patience, where: str) -> socket.socket:
    """A connection to the first address of a name that takes it. Those that do not answer share the time for connecting."""
    addresses = _addresses(host, port, patience, where)
    until = time.monotonic() + patience.connect
    failure: OSError | None = None
    for number, (family, kind, protocol, _, target) in enumerate(addresses):
        share = max(0.5, (until - time.monotonic()) / (len(addresses) - number))
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(patience.left(share, where))
            sock.connect(target)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    why = (
        "it does not answer"
        if isinstance(failure, TimeoutError)
        else (failure.strerror or str(failure) if failure else "no address")
    )
    raise UnavailableError(f"no connection to {where}", why=why) from failure


def _addresses(host: str, port: int, patience: Patience, where: str) -> list[_AddressInfo]:
    """The addresses of a name. The C library's look-up cannot be interrupted and may take minutes where a resolver is dead, so it
    runs in a thread that is left behind; nothing waits for such a thread when the process ends or becomes the server."""
    numeric = host.replace(".", "").isdigit() or ":" in host
    result: list[list[_AddressInfo] | OSError] = []

    def look_up() -> None:
        try:
            flags = socket.AI_NUMERICHOST if numeric else 0
            # As bytes: text would import the idna codec, for 5 ms.
            result.append([*socket.getaddrinfo(host.encode("ascii"), port, type=socket.SOCK_STREAM, flags=flags)])
        except OSError as error:
            result.append(error)

    if numeric:
        look_up()
    else:
        import _thread

        finished = _thread.allocate_lock()
        finished.acquire()

        def in_background() -> None:
            look_up()
            finished.release()

        _thread.start_new_thread(in_background, ())
        finished.acquire(timeout=patience.left(patience.connect, where))
    found = result[0] if result else TimeoutError("the name server does not answer")
    if isinstance(found, OSError):
        why = found.strerror if isinstance(found, socket.gaierror) and found.strerror else str(found)
        raise UnavailableError(
            f"the name {host} cannot be resolved", why=why, remedy="Check the name, and whether this host has a network."
        ) from found
    return found


def secured(sock: socket.socket, host: str, patience: Patience, where: str, environ: Mapping[str, str]) -> socket.socket:
    import ssl

    try:
        context = ssl.create_default_context()
        _add_authorities(context, environ)
        sock.settimeout(patience.left(patience.connect, where))
        # As bytes: text would import the idna codec.
        return context.wrap_socket(sock, server_hostname=host.encode("ascii"))
    except ssl.SSLCertVerificationError as error:
        raise StoreError(
            f"{where} shows a certificate that this host does not trust",
            why=error.verify_message or str(error),
            remedy="Add the authority that signed it to SSL_CERT_FILE, or check what stands between here and there.",
        ) from error
    except ssl.SSLError as error:
        raise StoreError(
            f"no secure connection to {where}", why=error.reason or str(error), remedy="Check the address."
        ) from error
    except TimeoutError as error:
        raise UnavailableError(f"{where} does not answer", why=f"TLS took longer than {patience.connect:g} s") from error
    except OSError as error:
        raise UnavailableError(f"the connection to {where} broke", why=error.strerror or str(error)) from error


def _add_authorities(context: Any, environ: Mapping[str, str]) -> None:
    """What OpenSSL does not look for itself: the variables of requests and curl, and certifi where the system has no bundle, as
    in slim images (huggingface_hub brings certifi)."""
    import ssl

    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        bundle = environ.get(name)
        if bundle and Path(bundle).is_file():
            context.load_verify_locations(bundle)
            return
    paths = ssl.get_default_verify_paths()
    if paths.cafile is None and not (paths.capath and any(Path(paths.capath).iterdir())):
        try:
            from certifi import where
        except ImportError:
            return
        context.load_verify_locations(where())
