"""The two ports as ASGI applications: tokens, limits, dispatch, answers to what is refused, the log, the admin's own paths."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from .access import Refusal
from .endpoints import answer
from .exchange import Exchange, Hub
from .faults import App, Faults, Message, Receive, Rule, Scope, Send
from .limits import Limit
from .uploads import storage

_Answering = Callable[[Request], Coroutine[Any, Any, Response]]


def hub_app(hub: Hub, faults: Faults) -> App:
    """The port that HF_ENDPOINT names."""

    async def answering(request: Request) -> Response:
        if request.url.path.startswith("/_hub/"):
            return await admin(hub, faults, request)
        headers = _counted(hub, request)
        exchange = Exchange(hub, request, hub.access.user(request.headers.get("authorization")))
        response = await answer(exchange)
        response.headers.update(headers)
        return response

    return _logged(hub, "hub", faults.wrap(_answered(answering), "hub"))


def cdn_app(hub: Hub, faults: Faults) -> App:
    """The port that large files come from and go to."""

    async def answering(request: Request) -> Response:
        return await storage(hub, request)

    return _logged(hub, "cdn", faults.wrap(_answered(answering), "cdn"))


def _counted(hub: Hub, request: Request) -> dict[str, str]:
    path = request.url.path
    name = "resolvers" if "/resolve/" in path or "/resolve-cache/" in path else "api"
    limit = hub.limits.get(name)
    if limit is None:
        return {}
    return limit.headers(name, request.client.host if request.client else "")


def _logged(hub: Hub, port: str, inner: App) -> App:
    """Keeps a line of each request, whatever became of it; `status` is 0 where no answer began."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        line: dict[str, Any] = {
            "port": port,
            "method": scope["method"],
            "path": scope["raw_path"].decode(),
            "authorization": request.headers.get("authorization"),
            "range": request.headers.get("range"),
            "agent": request.headers.get("user-agent"),
            "status": 0,
            "bytes": 0,
        }
        if not request.url.path.startswith("/_hub/"):
            hub.log.append(line)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                line["status"] = message["status"]
            else:
                line["bytes"] += len(message.get("body", b""))
            await send(message)

        # uvicorn keeps the connection on the cycle whose bound method `send` is (uvicorn 0.54, protocols/http/h11_impl.py).
        scope["transport"] = send.__self__.transport  # type: ignore[attr-defined]
        await inner(scope, receive, sending)

    return app


def _answered(answering: _Answering) -> App:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await answering(Request(scope, receive))
        except Refusal as refusal:
            response = _refused(refusal)
        except ClientDisconnect:
            return
        await response(scope, receive, send)

    return app


def _refused(refusal: Refusal) -> Response:
    headers = {"X-Error-Message": refusal.message, **(refusal.headers or {})}
    if refusal.code:
        headers["X-Error-Code"] = refusal.code
    return JSONResponse({"error": refusal.message}, refusal.status, headers)


async def admin(hub: Hub, faults: Faults, request: Request) -> Response:
    """`/_hub/faults`, `/_hub/log`, `/_hub/limits`, `/_hub/options`, `/_hub/repo/KIND/OWNER/NAME`: GET to see, PUT to set."""
    what, _, rest = request.url.path.removeprefix("/_hub/").partition("/")
    body = await request.body()
    document = json.loads(body) if body else None
    actions: dict[str, Callable[[], Any]] = {
        "faults": lambda: _set_faults(faults, document),
        "log": lambda: _log(hub, document),
        "limits": lambda: _set_limits(hub, document),
        "options": lambda: _set_options(hub, document),
        "repo": lambda: _set_repository(hub, rest, document),
    }
    try:
        return JSONResponse(actions[what]())
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        return JSONResponse({"error": repr(error)}, 400)


def _set_faults(faults: Faults, document: Any) -> Any:
    if document is not None:
        faults.rules[:] = [Rule.parse(rule) for rule in document]
    return [{**vars(rule), "headers": dict(rule.headers)} for rule in faults.rules]


def _log(hub: Hub, document: Any) -> Any:
    found = [*hub.log]
    if document is not None:
        hub.log.clear()
    return found


def _set_limits(hub: Hub, document: Any) -> Any:
    if document is not None:
        hub.limits = {name: Limit(**limit) for name, limit in document.items()}
    return {name: {"quota": limit.quota, "window": limit.window} for name, limit in hub.limits.items()}


def _set_options(hub: Hub, document: Any) -> Any:
    options = ("multipart", "page", "resolve_cache", "xet")
    for name, value in (document or {}).items():
        if name not in options:
            raise ValueError(f"no option {name}")
        setattr(hub, name, value)
    return {name: getattr(hub, name) for name in options}


def _set_repository(hub: Hub, where: str, document: Any) -> Any:
    kind, _, name = where.partition("/")
    repository = hub.state.find(kind, name)
    if repository is None:
        raise ValueError("no such repository")
    settings = repository.settings
    for field, value in (document or {}).items():
        getattr(settings, field)
        setattr(settings, field, value)
    repository.settings = settings
    return vars(settings)
