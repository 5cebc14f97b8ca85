"""`python -m tests.hub --root DIR [--port N]`: a local Hub, until it is stopped."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn

from .access import Access
from .application import cdn_app, hub_app
from .exchange import Hub
from .faults import App, Faults, Rule
from .limits import Limit
from .state import State

HOST = "127.0.0.1"


def _bound(port: int) -> socket.socket:
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind((HOST, port))
    found.listen(2048)
    return found


def _server(app: App) -> uvicorn.Server:
    settings: dict[str, Any] = {"http": "h11", "ws": "none", "lifespan": "off", "proxy_headers": False}
    return uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, **settings))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.hub", description="A local Hub. Files, tokens and commits lie in DIR.")
    parser.add_argument("--root", type=Path, required=True, metavar="DIR")
    parser.add_argument("--port", type=int, default=0, help="of the Hub; the next free one if left out")
    parser.add_argument("--cdn-port", type=int, default=0, help="where large files come from")
    parser.add_argument("--faults", type=Path, metavar="FILE", help="rules in JSON, see tests/hub/faults.py")
    parser.add_argument("--xet", action="store_true", help="take part in xet, with a store in DIR")
    parser.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=QUOTA/SECONDS",
        help="requests of an address: resolvers=3000/300, api=500/300",
    )
    return parser.parse_args()


async def _serve(arguments: argparse.Namespace) -> None:
    root = arguments.root.absolute()
    hub = Hub(state=State(root), access=Access(root), xet=arguments.xet)
    faults = Faults()
    if arguments.faults:
        faults.rules = [Rule.parse(rule) for rule in json.loads(arguments.faults.read_text())]
    for text in arguments.limit:
        name, _, rule = text.partition("=")
        quota, _, window = rule.partition("/")
        hub.limits[name] = Limit(int(quota), float(window))
    sockets = _bound(arguments.port), _bound(arguments.cdn_port)
    hub.base, hub.cdn = (f"http://{HOST}:{each.getsockname()[1]}" for each in sockets)
    print(f"export HF_ENDPOINT={hub.base}", flush=True)
    print(f"# large files: {hub.cdn}; tokens: {root / 'tokens.json'}", file=sys.stderr, flush=True)
    servers = [_server(hub_app(hub, faults)), _server(cdn_app(hub, faults))]
    await asyncio.gather(*(server.serve([each]) for server, each in zip(servers, sockets, strict=True)))


def main() -> None:
    try:
        asyncio.run(_serve(_arguments()))
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
