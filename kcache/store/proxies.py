"""Which proxy a request goes through, by the variables that every HTTP client honours.

`https_proxy`, `http_proxy`, `all_proxy`, `no_proxy`, in small or capital letters; small ones win, as in curl and urllib. Only
proxies that are spoken to by plain HTTP: those are what environments name; others are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from kcache.errors import StoreError


def find_proxy(environ: Mapping[str, str], scheme: str, host: str, port: int) -> str | None:
    """The proxy's address as it was given, such as `http://user:word@proxy:3128`, or None for a direct connection.

    Raises:
        StoreError: one is asked for that kcache cannot speak to.
    """
    found = _variable(environ, f"{scheme}_proxy") or _variable(environ, "all_proxy")
    if not found or _exempt(_variable(environ, "no_proxy"), host, port):
        return None
    kind, separator, _ = found.partition("://")
    if not separator:
        return f"http://{found}"
    if kind != "http":
        raise StoreError(
            f"the proxy {kind}://... cannot be used",
            why="kcache speaks to proxies by plain HTTP",
            remedy=f"Set {scheme}_proxy to an http:// proxy, or name {host} in no_proxy.",
        )
    return found


def _variable(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name) or environ.get(name.upper(), "")


def _exempt(no_proxy: str, host: str, port: int) -> bool:
    """Whether a host is named: itself, a domain above it, with or without a port, or an address range that holds it."""
    host = host.lower().rstrip(".")
    for word in no_proxy.replace(",", " ").lower().split():
        if word == "*":
            return True
        name, colon, number = word.rpartition(":")
        if colon and number.isdigit() and not name.endswith(":"):
            if number != str(port):
                continue
            word = name  # noqa: PLW2901
        word = word.strip("[]").lstrip("*").lstrip(".").rstrip(".")  # noqa: PLW2901
        if word and (host == word or host.endswith(f".{word}") or ("/" in word and _within(host, word))):
            return True
    return False


def _within(host: str, network: str) -> bool:
    import ipaddress

    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False
