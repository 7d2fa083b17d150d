"""What a Hub's lies are made of: other contents of files, other headers, other listings, other variants.

Foreign Python writes the file that FOREIGN_CODE_RAN names, so that a test sees whether it ran.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.attacks.lying_hub import Answer, Asked, Spoil

MARKER = "FOREIGN_CODE_RAN"
FOREIGN = f'open(__import__("os").environ["{MARKER}"], "w").close()\n'.encode()
# One that every torch of this project prefers to the plain Python of the honest variant.
PREFERRED = "torch-stable-abi211-cpu-x86_64-linux"


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def same_size(content: bytes) -> bytes:
    """Return foreign Python of the same size as `content`."""
    padding = len(content) - len(FOREIGN)
    assert padding >= 1, f"{len(content)} bytes are too few"
    return FOREIGN + b"#" * (padding - 1) + b"\n"


def forged(files: Mapping[str, bytes | None]) -> dict[str, Spoil]:
    """Return the spoils that agree on other contents of files, by path in the repository; None takes a file away."""

    def tree(asked: Asked, answer: Answer) -> Answer:
        entries = {entry["path"]: entry for entry in json.loads(answer.body)}
        for path, content in files.items():
            entries.pop(path, None)
            if content is not None:
                entries |= listed(path, content, asked)
        return answer.with_body(json.dumps(list(entries.values())).encode())

    def head(asked: Asked, answer: Answer) -> Answer:
        content = files.get(asked.path)
        if content is None:
            return answer
        headers = {"etag": f'"{blob_id(content)}"', "x-repo-commit": asked.revision}
        return Answer(200, {**headers, "content-length": str(len(content))})

    def get(asked: Asked, answer: Answer) -> Answer:
        content = files.get(asked.path)
        return answer if content is None else Answer(200, head(asked, answer).headers, content)

    return {"tree": tree, "head": head, "get": get}


def listed(path: str, content: bytes, asked: Asked) -> dict[str, dict[str, Any]]:
    """Return the entries of a listing that one more file brings: in `build` alone, it is the folder of its variant."""
    if asked.path == "build":
        folder = "/".join(path.split("/")[:2])
        return {folder: {"type": "directory", "path": folder, "oid": "0" * 40, "size": 0}}
    return {path: {"type": "file", "path": path, "oid": blob_id(content), "size": len(content)}}


def sent(files: Mapping[str, bytes]) -> dict[str, Spoil]:
    """Return the spoil that sends other bodies only; listing, length in HEAD and ETag stay the honest ones."""

    def get(asked: Asked, answer: Answer) -> Answer:
        return answer.with_body(files[asked.path]) if asked.path in files else answer

    return {"get": get}


def header(**changes: str | None) -> dict[str, Spoil]:
    """Return the spoil that gives every file's HEAD and GET these headers."""

    def spoil(asked: Asked, answer: Answer) -> Answer:
        return answer.with_headers(**changes)

    return {"head": spoil, "get": spoil}


def entries(change: Callable[[list[dict[str, Any]]], Any]) -> dict[str, Spoil]:
    """Return the spoil that hands the recursive listing to `change`, and sends what that returns, as JSON."""

    def tree(asked: Asked, answer: Answer) -> Answer:
        listing = json.loads(answer.body)
        return answer if asked.path else answer.with_body(json.dumps(change(listing)).encode())

    return {"tree": tree}


def each_entry(**changes: Any) -> dict[str, Spoil]:
    """Return the spoil that changes all files of the recursive listing; Ellipsis takes a key away."""

    def change(entry: dict[str, Any]) -> dict[str, Any]:
        entry = {**entry, **changes} if entry["type"] == "file" else entry
        return {key: value for key, value in entry.items() if value is not ...}

    return entries(lambda listing: [change(entry) for entry in listing])


def contents(variant: Path) -> dict[str, bytes]:
    """Return every file of a variant but bytecode, by path in it."""
    files = [file for file in sorted(variant.rglob("*")) if file.is_file() and file.suffix != ".pyc"]
    return {file.relative_to(variant).as_posix(): file.read_bytes() for file in files}


def foreign_variant(variant: Path, name: str, **metadata: Any) -> dict[str, bytes]:
    """Return a foreign variant whose digest is its own, by path in the repository; metadata.json has these changes."""
    files = contents(variant)
    files["__init__.py"] += FOREIGN
    return {f"build/{name}/{path}": content for path, content in redigested(files, **metadata).items()}


def redigested(files: Mapping[str, bytes], **metadata: Any) -> dict[str, bytes]:
    """Return the files with a digest in metadata.json that is theirs, and other changes of metadata.json."""
    content = {**json.loads(files["metadata.json"]), **metadata}
    if "digest" not in metadata:
        content["digest"] = {"algorithm": "sha256", "files": digests(files)}
    return {**files, "metadata.json": json.dumps(content).encode()}


def digests(files: Mapping[str, bytes]) -> dict[str, str]:
    return {
        path: base64.b64encode(hashlib.sha256(content).digest()).decode()
        for path, content in files.items()
        if path != "metadata.json"
    }
