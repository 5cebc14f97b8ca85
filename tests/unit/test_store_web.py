"""Reading over HTTP: addresses, proxies, TLS, dead name servers, and servers that answer in odd ways. Real sockets throughout."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from kcache.errors import AccessDeniedError, NotFoundError, StoreError, UnavailableError, UsageError
from kcache.store.dial import Patience
from kcache.store.hf import HfStore
from kcache.store.hub import HubSettings, Place
from kcache.store.mirror import MirrorStore
from kcache.store.open import at_revision, is_pinned
from kcache.store.proxies import find_proxy
from kcache.store.wire import Address

Talk = Callable[[socket.socket], None]


@contextmanager
def server(talk: Talk) -> Iterator[int]:
    """A port at which every connection is handed to `talk`, in a thread of its own."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=50)

    def accept() -> None:
        while True:
            try:
                taken, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=handle, args=(taken,), daemon=True).start()

    def handle(taken: socket.socket) -> None:
        try:
            with taken:
                talk(taken)
        except OSError:
            pass  # the other side has gone

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.close()


def request(taken: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        if not (part := taken.recv(4096)):
            break
        data += part
    return data


def answering(*answers: bytes) -> Talk:
    """Answers each request of a connection with the next of these, then ends it."""

    def talk(taken: socket.socket) -> None:
        for answer in answers:
            if not request(taken):
                return
            taken.sendall(answer)

    return talk


def mirror(port: int, *, environ: Mapping[str, str] | None = None, stall: float = 5.0, scheme: str = "http") -> MirrorStore:
    patience = Patience(connect=3, silence=2)
    return MirrorStore(f"{scheme}://127.0.0.1:{port}/s", patience=patience, stall=stall, environ=environ or {})


def read(store: MirrorStore, name: str = "a", offset: int = 0) -> bytes:
    return b"".join(store.read(name, offset=offset))


# answers ------------------------------------------------------------------------------------------------------------------

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"

ODD: dict[str, bytes] = {
    "plain": OK,
    "by the end of the connection": b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello",
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\n\r\nhello",
    "in chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nhel\r\n2\r\nlo\r\n0\r\nTrailer: x\r\n\r\n",
    "bare line ends": b"HTTP/1.1 200 OK\nContent-Length: 5\n\nhello",
    "no reason": b"HTTP/1.1 200\r\ncontent-LENGTH:   5  \r\n\r\nhello",
    "early hints": b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + OK,
    "more than was promised": OK + b"and more",
}


@pytest.mark.parametrize("answer", ODD.values(), ids=ODD)
def test_what_is_an_answer_is_understood(answer: bytes) -> None:
    with server(answering(answer)) as port:
        store = mirror(port)
        assert read(store) == b"hello"
        assert read(store) == b"hello"


WRONG: dict[str, tuple[bytes, type[StoreError], str]] = {
    "404": (b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", NotFoundError, "there is no a"),
    "401": (b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", AccessDeniedError, "answered 401"),
    "418": (b"HTTP/1.1 418 No\r\nContent-Length: 0\r\n\r\n", StoreError, "answered 418"),
    "a page": (b"HTTP/1.1 200 OK\r\nContent-Type: text/HTML; x\r\nContent-Length: 5\r\n\r\nhello", StoreError, "web page"),
    "compressed": (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello", StoreError, "encoding"),
    "another part": (
        b"HTTP/1.1 206 P\r\nContent-Range: bytes 9-13/20\r\nContent-Length: 5\r\n\r\nhello",
        StoreError,
        "another part",
    ),
    "no redirect": (b"HTTP/1.1 302 F\r\nLocation: gopher://x/\r\nContent-Length: 0\r\n\r\n", StoreError, "no address"),
    "short": (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello", UnavailableError, "broke off after 5 bytes"),
    "chunk without a length": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        UnavailableError,
        "a chunk has no length",
    ),
    "length without a number": (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", UnavailableError, "no number"),
    "headers without end": (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 20_000, UnavailableError, "more headers"),
    "a line without end": (b"x" * 200_000, UnavailableError, "line that does not end"),
    "another protocol": (b"SSH-2.0-OpenSSH\r\n", UnavailableError, "does not answer in HTTP"),
    "nothing": (b"", UnavailableError, "without an answer"),
}


@pytest.mark.parametrize(("answer", "kind", "message"), WRONG.values(), ids=WRONG)
def test_what_is_none_is_an_error_of_the_right_kind(answer: bytes, kind: type[StoreError], message: str) -> None:
    with server(answering(answer)) as port, pytest.raises(StoreError, match=message) as caught:
        read(mirror(port, stall=0.5))
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def test_a_server_that_ignores_ranges_is_read_from_the_offset() -> None:
    with server(answering(OK)) as port:
        assert read(mirror(port), offset=2) == b"llo"
        assert read(mirror(port), offset=5) == read(mirror(port), offset=9) == b""


def test_a_file_that_changes_while_it_is_read_is_an_error() -> None:
    parts = iter(
        [b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 9\r\n\r\nhello', b'HTTP/1.1 200 OK\r\nETag: "2"\r\n\r\nother']
    )

    def talk(taken: socket.socket) -> None:
        request(taken)
        taken.sendall(next(parts))

    with server(talk) as port, pytest.raises(StoreError, match="was changed while it was read"):
        read(mirror(port))


def test_one_connection_serves_one_request_after_another() -> None:
    connections = []

    def talk(taken: socket.socket) -> None:
        connections.append(taken)
        answering(*[OK] * 20)(taken)

    with server(talk) as port:
        store = mirror(port)
        for _ in range(5):
            assert read(store) == b"hello"
        assert store.stat("a") is not None
    assert len(connections) == 1


def test_what_comes_after_an_answer_is_not_the_next_one() -> None:
    smuggled = OK + b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad"
    with server(answering(*[smuggled] * 3)) as port:
        store = mirror(port)
        assert read(store) == read(store) == b"hello"


def test_a_server_that_never_answers_is_given_up_after_a_few_attempts() -> None:
    with server(lambda taken: None) as port:
        store = mirror(port, stall=600)
        with pytest.raises(UnavailableError):
            read(store)
        assert store.http_requests == 5


def test_a_kept_connection_that_was_closed_is_made_again_without_a_pause() -> None:
    with server(answering(OK)) as port:
        store = mirror(port)
        started = time.monotonic()
        for _ in range(5):
            assert read(store) == b"hello"
            time.sleep(0.02)
        assert store.http_requests == 5
        assert time.monotonic() - started < 5


def test_a_slow_drip_ends_at_the_moment_that_was_given() -> None:
    def talk(taken: socket.socket) -> None:
        request(taken)
        taken.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        for _ in range(600):
            taken.sendall(b"x")
            time.sleep(0.1)

    with server(talk) as port:
        started = time.monotonic()
        store = MirrorStore(f"http://127.0.0.1:{port}", patience=Patience(until=started + 1.5), stall=60, environ={})
        with pytest.raises(UnavailableError, match="longer than the time that was allowed"):
            read(store)
        assert time.monotonic() - started < 20


def test_a_token_does_not_follow_a_redirect_to_another_origin() -> None:
    seen: list[bytes] = []

    def storage(taken: socket.socket) -> None:
        seen.append(request(taken))
        taken.sendall(OK)

    with server(storage) as cdn:
        commit = "a" * 40
        moved = (
            f"HTTP/1.1 302 F\r\nX-Repo-Commit: {commit}\r\nLocation: http://127.0.0.1:{cdn}/x?sig=1\r\nContent-Length: 0\r\n\r\n"
        )

        def hub(taken: socket.socket) -> None:
            seen.append(request(taken))
            taken.sendall(moved.encode())

        with server(hub) as port:
            environ = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_TOKEN": "hf_secret"}
            assert b"".join(HfStore("hf://o/r", environ=environ).read("a")) == b"hello"
    assert b"Bearer hf_secret" in seen[0] and seen[0].startswith(b"GET /o/r/resolve/main/a HTTP/1.1\r\n")
    assert b"hf_secret" not in seen[1] and seen[1].startswith(b"GET /x?sig=1 ")


# proxies and TLS ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "url", "proxy"),
    [
        ({}, "https://hub.example", None),
        ({"https_proxy": "http://p:1"}, "https://hub.example", "http://p:1"),
        ({"HTTPS_PROXY": "p:1"}, "https://hub.example", "http://p:1"),
        ({"https_proxy": "http://p:1"}, "http://hub.example", None),
        ({"all_proxy": "http://p:1"}, "http://hub.example", "http://p:1"),
        ({"https_proxy": "http://p:1", "no_proxy": "*"}, "https://hub.example", None),
        ({"https_proxy": "http://p:1", "no_proxy": "example"}, "https://hub.example", None),
        ({"https_proxy": "http://p:1", "NO_PROXY": ".example, x"}, "https://hub.example", None),
        ({"https_proxy": "http://p:1", "no_proxy": "*.example"}, "https://hub.example", None),
        ({"https_proxy": "http://p:1", "no_proxy": "ample"}, "https://hub.example", "http://p:1"),
        ({"https_proxy": "http://p:1", "no_proxy": "hub.example:443"}, "https://hub.example", None),
        ({"https_proxy": "http://p:1", "no_proxy": "hub.example:80"}, "https://hub.example", "http://p:1"),
        ({"https_proxy": "http://p:1", "no_proxy": "10.0.0.0/8"}, "https://10.1.2.3", None),
        ({"https_proxy": "http://p:1", "no_proxy": "10.0.0.0/8"}, "https://11.1.2.3", "http://p:1"),
        ({"https_proxy": "http://p:1", "no_proxy": "::1"}, "https://[::1]:8", None),
        ({"https_proxy": ""}, "https://hub.example", None),
    ],
)
def test_the_proxy_is_the_one_that_other_clients_take(environ: dict[str, str], url: str, proxy: str | None) -> None:
    at = Address(url)
    assert find_proxy(environ, at.scheme, at.host, at.port) == proxy


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that signs itself, with its key in the same file."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(path), "-out", str(path) + ".crt"]
    subprocess.run(command, check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + Path(f"{path}.crt").read_bytes())
    return path


@contextmanager
def secure_server(certificate: Path) -> Iterator[int]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    def talk(taken: socket.socket) -> None:
        with context.wrap_socket(taken, server_side=True) as secured:
            answering(OK, OK)(secured)

    with server(talk) as port:
        yield port


def test_tls_is_verified(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with secure_server(certificate) as port:
        with pytest.raises(StoreError, match=r"does not trust: self.signed certificate\. Add the authority") as caught:
            read(mirror(port, scheme="https"))
        assert type(caught.value) is StoreError
        bundle = f"{certificate}.crt"
        assert read(mirror(port, scheme="https", environ={"REQUESTS_CA_BUNDLE": bundle})) == b"hello"
        monkeypatch.setenv("SSL_CERT_FILE", bundle)
        assert read(mirror(port, scheme="https")) == b"hello"
        store = MirrorStore(f"https://localhost:{port}/s", environ={}, stall=5)
        with pytest.raises(StoreError, match="does not trust"):
            read(store)

    def another(taken: socket.socket) -> None:
        taken.sendall(b"SSH-2.0-OpenSSH\r\n")

    with server(another) as port, pytest.raises(StoreError, match=r"no secure connection to https://127"):
        read(mirror(port, scheme="https"))


def test_tls_goes_through_a_proxy_as_a_tunnel(certificate: Path) -> None:
    asked: list[bytes] = []

    def proxy(taken: socket.socket) -> None:
        asked.append(request(taken))
        if b"Proxy-Authorization: Basic dXNlcjpwQHNz" not in asked[-1]:
            taken.sendall(b"HTTP/1.1 407 Who\r\nContent-Length: 0\r\n\r\n")
            return
        host, _, port = asked[-1].split()[1].decode().partition(":")
        with socket.create_connection((host, int(port))) as onward:
            taken.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            threading.Thread(target=copy, args=(onward, taken), daemon=True).start()
            copy(taken, onward)

    def copy(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            pass

    with secure_server(certificate) as port, server(proxy) as through:
        environ = {"https_proxy": f"http://user:p%40ss@127.0.0.1:{through}", "CURL_CA_BUNDLE": f"{certificate}.crt"}
        assert read(mirror(port, scheme="https", environ=environ)) == b"hello"
        assert asked[0].startswith(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n".encode())
        environ["https_proxy"] = f"http://127.0.0.1:{through}"
        with pytest.raises(AccessDeniedError, match=r"does not let kcache through to 127\.0\.0\.1: it answered 407"):
            read(mirror(port, scheme="https", environ=environ))


SILENT = """
import socket, subprocess, sys, time
taken = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
taken.bind(("127.0.0.2", 53))
code = '''
import time
from kcache.store.dial import Patience
from kcache.store.mirror import MirrorStore
started = time.monotonic()
try:
    MirrorStore("https://hub.example.com", patience=Patience(connect=1), stall=2, environ={}).stat("a")
except Exception as error:
    print(type(error).__name__, error)
print(time.monotonic() - started < 30)
'''
started = time.monotonic()
print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout)
print("ended", time.monotonic() - started < 60)
"""


@pytest.mark.root
def test_a_dead_name_server_costs_no_more_than_connecting_may(tmp_path: Path) -> None:
    """The C library alone would wait for 5 x 30 s, and cannot be interrupted."""
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.2\noptions timeout:30 attempts:5\n")
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")
    # A name space of mounts of their own: this name server is for these processes only.
    script = 'mount --bind "$1" /etc/resolv.conf && exec "$2" -c "$3"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", str(tmp_path / "resolv.conf"), sys.executable, SILENT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip("no mounts here")
    assert "UnavailableError the name hub.example.com cannot be resolved: the name server does not answer" in done.stdout, done
    assert "ended True" in done.stdout and "\nTrue" in done.stdout


# addresses ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "location", "target"),
    [
        ("https://h/a/b?c", "/x?y#z", "https://h/x?y"),
        ("https://h/a/b?c", "x", "https://h/a/x"),
        ("https://h:8/a/b", "//o:9/x", "https://o:9/x"),
        ("http://h/a", "HTTPS://O/x?u=http://y", "https://o/x?u=http://y"),
        ("http://[::1]:8/a", "/b", "http://[::1]:8/b"),
        ("http://h?q", "/b", "http://h/b"),
    ],
)
def test_where_a_redirect_leads(base: str, location: str, target: str) -> None:
    found = Address(base).join(location)
    assert f"{found.scheme}://{found.authority}{found.target}" == target


@pytest.mark.parametrize(
    "url", ["", "h", "file:///x", "https://", "https://h:x/", "https://h/a b", "https://h/a\r\nX: y", "https://hä/"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match="is no address"):
        Address(url)


@pytest.mark.parametrize(
    ("url", "repo", "revision", "prefix"),
    [
        ("hf://o/r", "o/r", "main", ""),
        ("hf://o/r/", "o/r", "main", ""),
        ("hf://o/r@v1.0", "o/r", "v1.0", ""),
        ("hf://o/r@refs%2Fpr%2F1/a/b", "o/r", "refs/pr/1", "a/b"),
        ("hf://models/o/r/x", "o/r", "main", "x"),
    ],
)
def test_a_place_on_the_hub(url: str, repo: str, revision: str, prefix: str) -> None:
    place = Place(url)
    assert (place.repo, place.revision, place.prefix) == (repo, revision, prefix)
    assert place.name(place.path("v1/x.json")) == "v1/x.json"


def test_a_revision_is_given_once() -> None:
    assert at_revision("hf://o/r/d", "team/x") == "hf://o/r@team%2Fx/d"
    assert at_revision("hf://o/r@x", "x") == "hf://o/r@x" and at_revision("hf://o/r", None) == "hf://o/r"
    with pytest.raises(UsageError, match="another revision"):
        at_revision("hf://o/r@x", "y")
    assert is_pinned(f"hf://o/r@{'a1' * 20}/d") and not is_pinned("hf://o/r@main") and not is_pinned(f"/x@{'a1' * 20}")


def test_the_token_is_the_one_that_huggingface_hub_takes(tmp_path: Path) -> None:
    def token(**environ: str) -> str | None:
        return HubSettings({"HOME": str(tmp_path), **environ}).token

    assert token() is None
    (tmp_path / ".cache/huggingface").mkdir(parents=True)
    (tmp_path / ".cache/huggingface/token").write_text("file\n")
    (tmp_path / "other").write_text("other")
    assert token() == "file"
    assert token(HF_TOKEN=" env\r\n") == "env"
    assert token(HF_TOKEN="", HUGGING_FACE_HUB_TOKEN="old") == "old"
    assert token(HF_TOKEN_PATH="~/other") == "other"
    assert token(HF_HOME="/none") is None and token(XDG_CACHE_HOME="/none") is None
    assert token(HF_TOKEN="env", HF_HUB_DISABLE_IMPLICIT_TOKEN="1") is None
    assert token(HF_TOKEN="a\x01b") == "file"
    assert HubSettings({"HF_ENDPOINT": "http://mirror:8/", "TRANSFORMERS_OFFLINE": "1"}).endpoint == "http://mirror:8"
    assert HubSettings({"HF_HUB_OFFLINE": "true"}).offline and not HubSettings({"HF_HUB_OFFLINE": "0"}).offline


def test_the_default_endpoint_is_huggingface_hubs_own() -> None:
    from huggingface_hub import constants

    from kcache.store.hub import DEFAULT_ENDPOINT

    assert constants._HF_DEFAULT_ENDPOINT == DEFAULT_ENDPOINT
