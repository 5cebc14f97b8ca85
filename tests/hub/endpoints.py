"""The protocol, but for uploads: repositories, revisions, listings, commits and files.

Written against huggingface_hub 2.4.0: `hf_api.py`, `_commit_api.py`, `file_download.py`. Paths arrive raw: a revision or a path
below `tree/` may be one segment in which slashes are quoted.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from starlette.responses import JSONResponse, Response

from . import uploads, xet
from .access import Refusal
from .exchange import Exchange, commit_of, send_file
from .state import File, Repository, Settings

Endpoint = Callable[..., Awaitable[Response]]
KINDS = {"model": "models", "dataset": "datasets", "space": "spaces", None: "models"}
FILES_IN_INFO = 100_000

ROUTES: list[tuple[str, re.Pattern[str], Endpoint]] = []


def route(method: str, pattern: str) -> Callable[[Endpoint], Endpoint]:
    """`{kind}`, `{repo}`, `{rev}`, `{path}` stand for what their names say; each is passed as a keyword, unquoted."""
    parts = {
        "kind": "(?P<kind>models|datasets|spaces)",
        "prefix": "(?:(?P<prefix>datasets|spaces)/)?",
        "repo": "(?P<repo>[^/]+/[^/]+)",
        "rev": "(?P<rev>[^/]+)",
        "path": "(?P<path>.+)",
    }

    def register(endpoint: Endpoint) -> Endpoint:
        ROUTES.append((method, re.compile(re.sub(r"{(\w+)}", lambda found: parts[found[1]], pattern)), endpoint))
        return endpoint

    return register


async def answer(exchange: Exchange) -> Response:
    """The answer of whichever endpoint the request is for.

    Raises:
        Refusal
    """
    raw = exchange.request.scope["raw_path"].decode()
    method = exchange.request.method
    for allowed, pattern, endpoint in ROUTES:
        if method in allowed.split("|") and (found := pattern.fullmatch(raw)):
            words = {name: unquote(text) for name, text in found.groupdict().items() if text is not None}
            if "kind" not in words and "repo" in words:
                words["kind"] = words.pop("prefix", "models")
            return await endpoint(exchange, **words)
    raise Refusal(404, f"Sorry, this local Hub has no {method} {raw}")


@route("GET", "/api/whoami-v2")
async def whoami(exchange: Exchange) -> Response:
    user = exchange.user
    if user is None:
        raise Refusal(401, "Invalid username or password.")
    return JSONResponse(
        {
            "type": "user",
            "id": user.name,
            "name": user.name,
            "fullname": user.name,
            "orgs": [{"name": org, "type": "org"} for org in user.orgs],
            "auth": {"type": "access_token", "accessToken": {"displayName": user.name, "role": user.role}},
        }
    )


@route("POST", "/api/validate-yaml")
async def validate_yaml(exchange: Exchange) -> Response:
    content = (await exchange.json())["content"]
    if not content.startswith("---\n"):
        return JSONResponse({"errors": [], "warnings": [{"message": "empty or missing yaml metadata in repo card"}]})
    if "\n---\n" not in content[3:]:
        return JSONResponse({"errors": [{"message": "the metadata block does not end"}], "warnings": []}, 400)
    return JSONResponse({"errors": [], "warnings": []})


@route("POST", "/api/repos/create")
async def create(exchange: Exchange) -> Response:
    asked = await exchange.json()
    user = exchange.user
    if user is None:
        raise Refusal(401, "Invalid username or password.")
    namespace = asked.get("organization") or user.name
    name = f"{namespace}/{asked['name']}"
    kind = KINDS[asked.get("type")]
    url = f"{exchange.hub.base}/{'' if kind == 'models' else f'{kind}/'}{name}"
    if not user.belongs_to(namespace) or user.role != "write":
        raise Refusal(403, f'You don\'t have the rights to create a model under the namespace "{namespace}"')
    if exchange.hub.state.find(kind, name) is not None:
        return JSONResponse({"error": "You already created this model repo", "url": url}, 409)
    private = bool(asked.get("private") or asked.get("visibility") == "private")
    exchange.hub.state.create(kind, name, Settings(private=private))
    return JSONResponse({"url": url, "name": name, "id": name})


@route("DELETE", "/api/repos/delete")
async def delete(exchange: Exchange) -> Response:
    asked = await exchange.json()
    namespace = asked.get("organization") or (exchange.user.name if exchange.user else "")
    repository, _ = exchange.writable(KINDS[asked.get("type")], f"{namespace}/{asked['name']}")
    exchange.hub.state.delete(repository.kind, repository.name)
    return Response()


@route("PUT", "/api/{kind}/{repo}/settings")
async def settings(exchange: Exchange, kind: str, repo: str) -> Response:
    repository, _ = exchange.writable(kind, repo)
    asked = await exchange.json()
    now = repository.settings
    if "visibility" in asked or "private" in asked:
        now.private = asked.get("visibility") == "private" or bool(asked.get("private"))
    if "gated" in asked:
        now.gated = bool(asked["gated"])
    repository.settings = now
    return JSONResponse(asked)


@route("GET", "/api/{kind}/{repo}")
async def info(exchange: Exchange, kind: str, repo: str) -> Response:
    return await info_at(exchange, kind, repo, "main")


@route("GET", "/api/{kind}/{repo}/revision/{rev}")
async def info_at(exchange: Exchange, kind: str, repo: str, rev: str) -> Response:
    repository = exchange.readable(kind, repo)
    oid = commit_of(repository, rev)
    files = sorted(repository.tree(oid).items())[:FILES_IN_INFO]
    blobs = exchange.query.get("blobs", "").lower() in ("1", "true")
    return JSONResponse(
        {
            "_id": repo,
            "id": repo,
            "modelId": repo,
            "author": repo.partition("/")[0],
            "sha": oid,
            "private": repository.settings.private,
            "gated": "manual" if repository.settings.gated else False,
            "disabled": repository.settings.disabled,
            "lastModified": repository.commit(oid).date,
            "createdAt": repository.commit(oid).date,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "siblings": [{"rfilename": path, **(_blob_info(file) if blobs else {})} for path, file in files],
        }
    )


def _blob_info(file: File) -> dict[str, Any]:
    found: dict[str, Any] = {"size": file.size, "blobId": file.oid}
    if file.lfs:
        found["lfs"] = {"sha256": file.sha256, "size": file.size, "pointerSize": file.pointer_size}
    return found


def _listed(path: str, file: File) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "file", "path": path, "size": file.size, "oid": file.oid}
    if file.lfs:
        found["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": file.pointer_size}
    if file.xet:
        found["xetHash"] = file.xet
    return found


def _folder(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}


@route("GET", "/api/{kind}/{repo}/tree/{rev}(?:/{path})?")
async def tree(exchange: Exchange, kind: str, repo: str, rev: str, path: str = "") -> Response:
    repository = exchange.readable(kind, repo, content=True)
    files = repository.tree(commit_of(repository, rev))
    path = path.strip("/")
    prefix = f"{path}/" if path else ""
    recursive = exchange.query.get("recursive", "").lower() in ("1", "true")
    found: dict[str, dict[str, Any]] = {}
    for name, file in files.items():
        if not name.startswith(prefix):
            continue
        below = name[len(prefix) :].split("/")
        for depth in range(1, len(below) if recursive else min(2, len(below))):
            folder = prefix + "/".join(below[:depth])
            found.setdefault(folder, _folder(folder))
        if recursive or len(below) == 1:
            found[name] = _listed(name, file)
    if path and not found:
        raise Refusal(404, f"{path} does not exist on {rev}", "EntryNotFound")
    return exchange.page([found[name] for name in sorted(found)], exchange.hub.page)


@route("POST", "/api/{kind}/{repo}/paths-info/{rev}")
async def paths_info(exchange: Exchange, kind: str, repo: str, rev: str) -> Response:
    repository = exchange.readable(kind, repo, content=True)
    files = repository.tree(commit_of(repository, rev))
    asked = [value for name, value in parse_qsl((await exchange.request.body()).decode()) if name == "paths"]
    if len(asked) > 1000:
        raise Refusal(413, "too many parameters")
    folders = [path for path in asked if path not in files and any(name.startswith(f"{path}/") for name in files)]
    return JSONResponse([_listed(path, files[path]) for path in asked if path in files] + [_folder(path) for path in folders])


@route("GET", "/api/{kind}/{repo}/refs")
async def refs(exchange: Exchange, kind: str, repo: str) -> Response:
    repository = exchange.readable(kind, repo)

    def listed(what: str, where: str) -> list[dict[str, str]]:
        return [{"name": name, "ref": f"refs/{where}/{name}", "targetCommit": oid} for name, oid in repository.refs(what).items()]

    return JSONResponse({"branches": listed("branches", "heads"), "tags": listed("tags", "tags"), "converts": []})


@route("GET", "/api/{kind}/{repo}/commits/{rev}")
async def commits(exchange: Exchange, kind: str, repo: str, rev: str) -> Response:
    repository = exchange.readable(kind, repo)
    items = [
        {"id": one.oid, "title": one.title, "message": one.message, "date": one.date, "authors": [{"user": one.author}]}
        for one in repository.history(commit_of(repository, rev))
    ]
    return exchange.page(items, 50)


@route("POST", "/api/{kind}/{repo}/branch/{rev}")
async def create_branch(exchange: Exchange, kind: str, repo: str, rev: str) -> Response:
    repository, _ = exchange.writable(kind, repo)
    if rev in repository.refs("branches"):
        raise Refusal(409, f"Reference already exists: refs/heads/{rev}")
    body = await exchange.request.body()
    start = (json.loads(body) if body else {}).get("startingPoint", "main")
    repository.set_ref("branches", rev, commit_of(repository, start))
    return JSONResponse({})


@route("POST", "/api/{kind}/{repo}/tag/{rev}")
async def create_tag(exchange: Exchange, kind: str, repo: str, rev: str) -> Response:
    repository, _ = exchange.writable(kind, repo)
    name = (await exchange.json())["tag"]
    if name in repository.refs("tags"):
        raise Refusal(409, f"Tag reference exists already: refs/tags/{name}")
    repository.set_ref("tags", name, commit_of(repository, rev))
    return JSONResponse({})


@route("POST", "/api/{kind}/{repo}/preupload/{rev}")
async def preupload(exchange: Exchange, kind: str, repo: str, rev: str) -> Response:
    repository, _ = exchange.writable(kind, repo)
    files = repository.tree(commit_of(repository, rev))
    answers = []
    for asked in (await exchange.json())["files"]:
        present = files.get(asked["path"])
        found = {
            "path": asked["path"],
            "uploadMode": uploads.mode(asked["path"], base64.b64decode(asked["sample"]), asked["size"]),
            "shouldIgnore": False,
        }
        if present is not None:
            found["oid"] = present.sha256 if present.lfs else present.oid
        answers.append(found)
    return JSONResponse({"files": answers})


@route("POST", "/api/{kind}/{repo}/commit/{rev}")
async def commit(exchange: Exchange, kind: str, repo: str, rev: str) -> Response:
    repository, user = exchange.writable(kind, repo)
    lines = [json.loads(line) for line in (await exchange.request.body()).splitlines() if line.strip()]
    # From here on nothing waits: commits of one repository come one after another.
    head = repository.refs("branches").get(rev)
    if head is None:
        raise Refusal(404, f"Invalid rev id: {rev}", "RevisionNotFound")
    header = next((line["value"] for line in lines if line["key"] == "header"), None)
    if header is None or not header.get("summary"):
        raise Refusal(400, "a commit needs a header with a summary")
    if header.get("parentCommit") not in (None, head):
        raise Refusal(412, "A commit has happened since. Please refresh and try again.")
    changes: dict[str, File | None] = {}
    for line in lines:
        if line["key"] != "header":
            _change(exchange, repository, head, changes, line["key"], line["value"])
    if not changes:
        raise Refusal(400, "an empty commit")
    oid = repository.add_commit(rev, changes, title=header["summary"], message=header.get("description") or "", author=user.name)
    where = "" if kind == "models" else f"{kind}/"
    return JSONResponse({"success": True, "commitOid": oid, "commitUrl": f"{exchange.hub.base}/{where}{repo}/commit/{oid}"})


def _change(
    exchange: Exchange, repository: Repository, head: str, changes: dict[str, File | None], key: str, value: dict[str, Any]
) -> None:
    files = repository.tree(head)
    blobs, path = exchange.hub.state.blobs, value["path"].rstrip("/")
    if key == "file":
        changes[path] = blobs.regular(base64.b64decode(value["content"]))
    elif key == "lfsFile":
        oid = value["oid"]
        size = value["size"] if "size" in value else next(f.size for f in files.values() if f.sha256 == oid)
        if not blobs.has(oid) and not xet.find(exchange.hub, oid, size):
            raise Refusal(400, f"LFS pointer pointed to a file that does not exist: {path} ({oid})")
        changes[path] = blobs.lfs(oid, size, xet=xet.hash_of(exchange.hub, oid))
    elif key == "deletedFile":
        if path not in files:
            raise Refusal(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        changes[path] = None
    elif key == "deletedFolder":
        changes.update(dict.fromkeys(name for name in files if name.startswith(f"{path}/")))
    else:
        raise Refusal(400, f"unknown operation {key}")


@route("GET|HEAD", "/{prefix}{repo}/resolve/{rev}/{path}")
async def resolve(exchange: Exchange, kind: str, repo: str, rev: str, path: str) -> Response:
    repository = exchange.readable(kind, repo, content=True)
    oid = commit_of(repository, rev)
    file = repository.tree(oid).get(path)
    headers = {"X-Repo-Commit": oid}
    if file is None:
        raise Refusal(404, "Entry not found", "EntryNotFound", headers)
    hub = exchange.hub
    if file.lfs:
        headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(file.size), "ETag": f'"{file.sha256}"'}
        if file.xet:
            headers |= xet.link(hub, kind, repo, oid, file.xet)
        name = path.rpartition("/")[2]
        where = f"{hub.cdn}/lfs/{file.sha256}?Expires=1&Signature=x&response-content-disposition={quote(name)}"
        return Response(status_code=302, headers={**headers, "Location": where})
    headers["ETag"] = f'"{file.oid}"'
    if hub.resolve_cache:
        return Response(
            status_code=307,
            headers={**headers, "Location": f"/api/resolve-cache/{kind}/{repo}/{oid}/{quote(path)}?etag={file.oid}"},
        )
    return send_file(exchange.request, hub.state.blobs.path(file.sha256), file.size, headers)


@route("GET|HEAD", "/api/resolve-cache/{kind}/{repo}/{rev}/{path}")
async def resolve_cached(exchange: Exchange, kind: str, repo: str, rev: str, path: str) -> Response:
    repository = exchange.readable(kind, repo, content=True)
    file = repository.tree(commit_of(repository, rev))[path]
    headers = {"X-Repo-Commit": rev, "ETag": f'"{file.oid}"'}
    return send_file(exchange.request, exchange.hub.state.blobs.path(file.sha256), file.size, headers)


route("POST", "/{prefix}{repo}\\.git/info/lfs/objects/batch")(uploads.batch)
route("POST", "/{prefix}{repo}\\.git/info/lfs/verify")(uploads.verify)
route("POST", "/{prefix}{repo}\\.git/info/lfs/complete/{path}")(uploads.complete)
route("GET", "/api/{kind}/{repo}/xet-(?P<access>read|write)-token/{rev}")(xet.token)
