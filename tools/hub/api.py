"""The part of the Hub's HTTP interface that `huggingface_hub` and `kernels` use for repositories of kernels.

Every file is stored as a regular one: answering "lfs" to `preupload` would send the client to Xet storage, which this
server does not have. For the same reason no answer carries X-Xet-Hash.

All functions run on one event loop, and none waits after its first look at the store, so each has the store to itself.
What a client has sent is read before that. A malformed body fails with status 500 and changes nothing.
"""

from __future__ import annotations

import base64
import json
import stat
from typing import Any
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tools.hub.store import Change, HubError, Repository


def part(request: Request, name: str, default: str = "") -> str:
    """Return a part of the path. It is decoded only here, so that an encoded slash stays inside its part."""
    return unquote(request.path_params.get(name, default))


def repo_id_of(request: Request) -> str:
    return f"{part(request, 'organization')}/{part(request, 'name')}"


def repository_of(request: Request) -> Repository:
    return request.app.state.store.repository(repo_id_of(request))


async def create_repository(request: Request) -> Response:
    wanted = await request.json()
    if wanted["type"] != "kernel":
        raise HubError(400, f"only kernels are stored here, not a {wanted['type']}")
    repo_id = f"{wanted['organization'] or ''}/{wanted['name']}"
    answer = {"url": f"{request.base_url}kernels/{repo_id}"}  # the client also reads it from a refusal
    if request.app.state.store.create(repo_id):
        return JSONResponse(answer)
    return JSONResponse({**answer, "error": f"repository {repo_id} exists already"}, 409)


async def validate_card(request: Request) -> Response:
    return JSONResponse({"errors": [], "warnings": []})


async def organization(request: Request) -> Response:
    name = part(request, "organization")
    trusted = name in request.app.state.trusted
    if not trusted and name not in request.app.state.store.organizations():
        raise HubError(404, f"no organization {name!r}")
    return JSONResponse({"name": name, "fullname": name, "trustedKernelPublisher": trusted})


async def information(request: Request) -> Response:
    sha = repository_of(request).resolve(part(request, "revision", "main"))
    return JSONResponse({"id": repo_id_of(request), "sha": sha, "private": False})


async def list_refs(request: Request) -> Response:
    refs: dict[str, list] = {"heads": [], "tags": []}
    for ref, sha in repository_of(request).refs().items():
        _, kind, name = ref.split("/", 2)
        refs[kind].append({"name": name, "ref": ref, "targetCommit": sha})
    return JSONResponse({"branches": refs["heads"], "tags": refs["tags"], "converts": []})


async def create_branch(request: Request) -> Response:
    start = (await request.json()).get("startingPoint", "main")
    repository_of(request).add_ref(f"refs/heads/{part(request, 'branch')}", start)
    return JSONResponse({})


async def create_tag(request: Request) -> Response:
    tag = (await request.json())["tag"]
    repository_of(request).add_ref(f"refs/tags/{tag}", part(request, "revision"))
    return JSONResponse({})


async def list_tree(request: Request) -> Response:
    repository, folder = repository_of(request), part(request, "path")
    entries = repository.entries(repository.resolve(part(request, "revision")))
    if folder and folder not in entries:
        raise HubError(404, f"no folder {folder!r}", "EntryNotFound")
    inside, recursive = f"{folder}/" if folder else "", request.query_params.get("recursive") == "true"
    return JSONResponse(
        [
            {
                "type": "directory" if stat.S_ISDIR(entry.mode) else "file",
                "path": path,
                "oid": entry.sha.decode(),
                "size": len(repository.read(entry)),
            }
            for path, entry in entries.items()
            if path.startswith(inside) and (recursive or "/" not in path.removeprefix(inside))
        ]
    )


async def preupload(request: Request) -> Response:
    """Say how to upload each file, and which blob exists now: the client does not upload unchanged files."""
    paths = [file["path"] for file in (await request.json())["files"]]
    repository = repository_of(request)
    there = repository.entries(repository.resolve(part(request, "revision")))
    how = {"uploadMode": "regular", "shouldIgnore": False}
    oids = {path: there[path].sha.decode() if path in there else None for path in paths}
    return JSONResponse({"files": [{"path": path, "oid": oid, **how} for path, oid in oids.items()]})


async def commit(request: Request) -> Response:
    """Take one JSON object per line: first a header, then the changes."""
    if "create_pr" in request.query_params:
        raise HubError(400, "there are no pull requests here")
    header, *lines = [json.loads(line) for line in (await request.body()).splitlines()]
    title, parent = header["value"]["summary"], header["value"].get("parentCommit")
    changes = [change(line["key"], line["value"]) for line in lines]
    sha = repository_of(request).commit(part(request, "revision"), title, changes, parent)
    url = f"{request.base_url}kernels/{repo_id_of(request)}/commit/{sha}"
    return JSONResponse({"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})


def change(key: str, value: dict[str, Any]) -> Change:
    if key in ("deletedFile", "deletedFolder"):
        return Change(value["path"].rstrip("/"), None)
    if key == "file":
        return Change(value["path"], base64.b64decode(value["content"], validate=True))
    raise HubError(400, f"a commit writes and deletes files here, and knows no {key!r}")


async def download(request: Request) -> Response:
    repository, path = repository_of(request), part(request, "path")
    sha = repository.resolve(part(request, "revision"))
    entry = repository.entries(sha).get(path)
    if entry is None or stat.S_ISDIR(entry.mode):
        raise HubError(404, f"no file {path!r} in {sha}", "EntryNotFound")
    return Response(repository.read(entry), headers={"ETag": f'"{entry.sha.decode()}"', "X-Repo-Commit": sha})


REPOSITORY = "/api/kernels/{organization}/{name}"
ROUTES = [
    Route("/api/repos/create", create_repository, methods=["POST"]),
    Route("/api/validate-yaml", validate_card, methods=["POST"]),
    Route("/api/organizations/{organization}/overview", organization),
    Route(REPOSITORY, information),
    Route(REPOSITORY + "/revision/{revision}", information),
    Route(REPOSITORY + "/refs", list_refs),
    Route(REPOSITORY + "/branch/{branch}", create_branch, methods=["POST"]),
    Route(REPOSITORY + "/tag/{revision}", create_tag, methods=["POST"]),
    Route(REPOSITORY + "/tree/{revision}", list_tree),
    Route(REPOSITORY + "/tree/{revision}/{path:path}", list_tree),
    Route(REPOSITORY + "/preupload/{revision}", preupload, methods=["POST"]),
    Route(REPOSITORY + "/commit/{revision}", commit, methods=["POST"]),
    Route("/kernels/{organization}/{name}/resolve/{revision}/{path:path}", download),
]
