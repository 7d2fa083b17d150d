"""The part of the Hub's HTTP interface that `huggingface_hub` and `kernels` use for repositories of kernels.

Every file is stored as a regular one: an answer of "lfs" to `preupload` would send the client to Xet storage, which is
not here. For the same reason no answer carries X-Xet-Hash.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from tools.hub.routes import Answer, Request, Routes, parse_json, pick
from tools.hub.store import Blob, Change, HubError, Proposal, check_path, git_hash

COMMIT_BODY = 256 << 20  # bytes; all files of all variants, in base64
REPOSITORY = "/api/kernels/{organization}/{name}"
ROUTES = Routes()


@ROUTES.post("/api/repos/create")
def create_repository(request: Request) -> Answer:
    kind, organization, name = request.json(type=str, organization=str, name=str)
    if kind != "kernel" or not organization or not name:
        raise HubError(400, 'need {"type": "kernel", "organization": ..., "name": ...}: only kernels are stored here')
    url = f"{request.url}/kernels/{organization}/{name}"
    try:
        request.site.store.create(organization, name)
    except HubError as error:
        if error.status != 409:
            raise
        return Answer({"error": str(error), "url": url}, 409)  # the client takes the url from here, too
    return Answer({"url": url})


@ROUTES.post("/api/validate-yaml")
def validate_card(request: Request) -> Answer:
    (content,) = request.json(content=str)
    if content is None:
        raise HubError(400, 'need {"content": text of the card}')
    return Answer({"errors": [], "warnings": []})


@ROUTES.get("/api/organizations/{organization}/overview")
def organization(request: Request) -> Answer:
    name = request.path["organization"]
    trusted = name in request.site.trusted
    if not trusted and not request.site.store.has_organization(name):
        raise HubError(404, f"no organization {name!r}")
    return Answer({"name": name, "fullname": name, "avatarUrl": "", "trustedKernelPublisher": trusted})


@ROUTES.get(REPOSITORY)
@ROUTES.get(REPOSITORY + "/revision/{revision}")
def information(request: Request) -> Answer:
    commit = request.repository.resolve(request.path.get("revision", "main"))
    return Answer({"id": request.repo_id, "author": request.path["organization"], "sha": commit.sha, "private": False})


@ROUTES.get(REPOSITORY + "/refs")
def list_refs(request: Request) -> Answer:
    def of_kind(kind: str) -> list[dict[str, str]]:
        prefix = f"refs/{kind}/"
        names = {ref: ref.removeprefix(prefix) for ref in refs if ref.startswith(prefix)}
        return [{"name": name, "ref": ref, "targetCommit": refs[ref]} for ref, name in names.items()]

    refs = request.repository.refs()
    return Answer({"converts": [], "branches": of_kind("heads"), "tags": of_kind("tags")})


@ROUTES.post(REPOSITORY + "/branch/{branch}")
def create_branch(request: Request) -> Answer:
    (start,) = request.json(startingPoint=str)
    request.repository.add_ref("heads", request.path["branch"], start or "main")
    return Answer()


@ROUTES.post(REPOSITORY + "/tag/{revision}")
def create_tag(request: Request) -> Answer:
    (tag,) = request.json(tag=str)
    request.repository.add_ref("tags", tag or "", request.path["revision"])
    return Answer()


@ROUTES.get(REPOSITORY + "/tree/{revision}")
@ROUTES.get(REPOSITORY + "/tree/{revision}/{path...}")
def list_tree(request: Request) -> Answer:
    files = request.repository.resolve(request.path["revision"]).files
    folder = request.path.get("path", "").rstrip("/")
    if folder:
        check_path(folder)
        files = {path: blob for path, blob in files.items() if path.startswith(f"{folder}/")}
        if not files:
            raise HubError(404, f"no folder {folder!r}", "EntryNotFound")
    return Answer(list(tree_entries(files, folder, request.flag("recursive"))))


def tree_entries(files: dict[str, Blob], folder: str, recursive: bool) -> Iterator[dict[str, Any]]:
    """Folders and files below `folder`; a folder's id hashes the paths and blobs in it."""
    depth = len(PurePosixPath(folder).parts)
    inside: dict[str, list[str]] = {}
    for path, blob in sorted(files.items()):
        parents = [str(parent) for parent in PurePosixPath(path).parents if len(parent.parts) > depth]
        for parent in parents if recursive else parents[-1:]:
            inside.setdefault(parent, []).append(f"{blob.oid} {path}")
        if recursive or not parents:
            yield {"type": "file", "path": path, "oid": blob.oid, "size": blob.size}
    for path, lines in inside.items():
        yield {"type": "directory", "path": path, "oid": git_hash("tree", "\n".join(lines).encode()), "size": 0}


@ROUTES.post(REPOSITORY + "/preupload/{revision}")
def preupload(request: Request) -> Answer:
    """Say how to upload each file, and the blob that is there now: the client leaves out what has not changed."""
    there = request.repository.resolve(request.path["revision"]).files
    (files,) = request.json(files=list)
    answers = []
    for file in files or []:
        (path,) = pick(file, path=str)
        check_path(path or "")
        oid = there[path].oid if path in there else None
        answers.append({"path": path, "uploadMode": "regular", "shouldIgnore": False, "oid": oid})
    return Answer({"files": answers})


@ROUTES.post(REPOSITORY + "/commit/{revision}", COMMIT_BODY)
def commit(request: Request) -> Answer:
    if request.flag("create_pr"):
        raise HubError(400, "there are no pull requests here")
    made = request.repository.commit(request.path["revision"], parse_commit(request.body))
    url = f"{request.url}/kernels/{request.repo_id}/commit/{made.sha}"
    return Answer({"success": True, "commitOid": made.sha, "commitUrl": url, "hookOutput": ""})


@ROUTES.get("/kernels/{organization}/{name}/resolve/{revision}/{path...}")
def download(request: Request) -> Answer:
    repository = request.repository
    commit = repository.resolve(request.path["revision"])
    path = request.path["path"]
    check_path(path)
    if path not in commit.files:
        raise HubError(404, f"no file {path!r} in {commit.sha}", "EntryNotFound")
    content = repository.read(commit.files[path])
    headers = {"ETag": f'"{commit.files[path].oid}"', "X-Repo-Commit": commit.sha, "Accept-Ranges": "bytes"}
    wanted = re.fullmatch(r"bytes=(\d{1,18})-(\d{0,18})", request.range or "")
    if not wanted:
        return Answer(content, headers=headers)
    first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
    if first > last:
        raise HubError(416, f"{path} has {len(content)} bytes, asked for {request.range}")
    headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
    return Answer(content[first : last + 1], 206, headers)


def parse_commit(body: bytes) -> Proposal:
    """Read one JSON object a line: first a header, then the changes."""
    lines = [pick(parse_json(line), key=str, value=dict) for line in body.splitlines() if line.strip()]
    if not lines or lines[0][0] != "header":
        raise HubError(400, 'the first line of a commit is {"key": "header", "value": {"summary": ...}}')
    title, description, parent = pick(lines[0][1], summary=str, description=str, parentCommit=str)
    if not title:
        raise HubError(400, "a commit needs a summary")
    return Proposal(title, description or "", parent, [parse_change(key, value) for key, value in lines[1:]])


def parse_change(key: str | None, value: dict | None) -> Change:
    path, content, encoding = pick(value, path=str, content=str, encoding=str)
    if path is None:
        raise HubError(400, f"a line of kind {key!r} needs a path")
    if key == "deletedFile":
        return Change(path.rstrip("/"), None)
    if key == "deletedFolder":
        return Change(f"{path.rstrip('/')}/", None)
    if key != "file" or encoding != "base64" or content is None:
        raise HubError(400, f"{path}: need a deletion, or a file in base64; got {key!r}, encoding {encoding!r}")
    try:
        return Change(path, base64.b64decode(content, validate=True))
    except ValueError as error:
        raise HubError(400, f"{path}: the content is not base64: {error}") from None
