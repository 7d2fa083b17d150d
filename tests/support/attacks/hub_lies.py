"""Lies of a Hub: well-formed answers that make a client run, keep or overwrite what nobody published."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.attacks.forgeries import (
    FOREIGN,
    PREFERRED,
    blob_id,
    contents,
    each_entry,
    entries,
    foreign_variant,
    forged,
    header,
    redigested,
    same_size,
    sent,
)
from tests.support.attacks.lying_hub import Answer, Asked, Lie, Spoil

Named = Iterator[tuple[str, Mapping[str, Spoil]]]
NOWHERE = "0" * 40


def lies(variant: Path, outside: Path, older: str) -> list[Lie]:
    """Return all of them. `variant` is the honest one in its build folder, `older` a commit before its own.

    `outside` is an absolute path that nobody has written to.
    """
    groups = {
        "other contents of files": other_contents(variant),
        "other metadata": other_metadata(variant),
        "wrong ETags": wrong_etags(outside),
        "wrong commits": wrong_commits(outside),
        "wrong listings": wrong_listings(variant),
        "paths that leave the cache": leaving_paths(variant, outside),
    }
    cases = [Lie(name, group, spoils) for group, named in groups.items() for name, spoils in named]
    cases += [Lie(name, "wrong refs", spoils, by) for name, by, spoils in wrong_refs(older)]
    assert len({case.name for case in cases}) == len(cases)
    return cases


def other_contents(variant: Path) -> Named:
    folder, honest = f"build/{variant.name}", contents(variant)
    init, ops = honest["__init__.py"], honest["_ops.py"]
    flipped = bytes([*init[:-2], init[-2] ^ 1, init[-1]])
    changed = redigested({**honest, "__init__.py": init + FOREIGN})
    yield "foreign __init__.py of the same size", sent({f"{folder}/__init__.py": same_size(init)})
    yield "foreign _ops.py of the same size", sent({f"{folder}/_ops.py": same_size(ops)})
    yield "one bit of __init__.py", sent({f"{folder}/__init__.py": flipped})
    yield "spaces for a line of _ops.py", sent({f"{folder}/_ops.py": ops.replace(b"import torch", b" " * 11 + b"\n")})
    yield "longer __init__.py in GET alone", sent({f"{folder}/__init__.py": init + FOREIGN})
    yield "longer __init__.py in HEAD and GET", {**forged({f"{folder}/__init__.py": init + FOREIGN}), "tree": untouched}
    yield "foreign __init__.py everywhere", forged({f"{folder}/__init__.py": init + FOREIGN})
    yield "foreign _ops.py everywhere", forged({f"{folder}/_ops.py": ops + FOREIGN})
    yield "empty __init__.py everywhere", forged({f"{folder}/__init__.py": b""})
    yield "foreign variant with its own digest", forged({f"{folder}/{path}": each for path, each in changed.items()})
    yield "_ops.py in place of __init__.py", sent({f"{folder}/__init__.py": ops})
    yield "foreign __init__.py at another address", {"head": sent_away(f"{folder}/__init__.py"), "": foreign_page}


def untouched(asked: Asked, answer: Answer) -> Answer:
    return answer


def sent_away(path: str) -> Spoil:
    def head(asked: Asked, answer: Answer) -> Answer:
        return Answer(302, {"location": f"/elsewhere/{asked.revision}"}) if asked.path == path else answer

    return head


def foreign_page(asked: Asked, answer: Answer) -> Answer:
    commit = asked.url.rpartition("/")[2]
    return Answer(200, {"etag": f'"{blob_id(FOREIGN)}"', "x-repo-commit": commit}, FOREIGN)


def other_metadata(variant: Path) -> Named:
    folder, honest = f"build/{variant.name}", contents(variant)
    foreign = {**honest, "__init__.py": honest["__init__.py"] + FOREIGN}
    changes = {
        "another license of the same length": sent({f"{folder}/metadata.json": relicensed(honest["metadata.json"])}),
        "metadata.json that is no JSON": forged({f"{folder}/metadata.json": b"{"}),
        "metadata.json that is nested deeply": forged({f"{folder}/metadata.json": b"[" * 100_000}),
        "metadata.json of 8 MB": forged({f"{folder}/metadata.json": honest["metadata.json"] + b" " * 2**23}),
    }
    yield from changes.items()
    for what, change in {
        "foreign code and no digest": {"digest": None},
        "foreign code, the name of a module as id": {"id": "json"},
        "foreign code, a path as id": {"id": "../../escaped"},
        "foreign code, another kernel's name": {"name": "torch"},
        "foreign code, another version": {"version": 99},
        "foreign code, another backend": {"backend": {"type": "cuda", "archs": ["9.0"]}},
        "foreign code, a kernel it depends on": {"kernel-depends": [{"repo-id": "org/tiny", "version": 1}]},
        "foreign code, a package it depends on": {"python-depends": ["numpy"]},
        "foreign code, a loader of tomorrow": {"kernels-minver": "99.0.0"},
    }.items():
        yield what, forged({f"{folder}/{path}": content for path, content in redigested(foreign, **change).items()})


def relicensed(metadata: bytes) -> bytes:
    return metadata.replace(b"Apache-2.0", b"Apache-0.2")


def wrong_etags(outside: Path) -> Named:
    for what, etag in {
        "no ETag": None,
        "an empty ETag": '""',
        "one ETag for all files": '"same"',
        "a weak ETag for all files": 'W/"same"',
        "an ETag with a slash": '"a/b"',
        "an ETag of a dot": '"."',
        "an ETag of two dots": '".."',
        "an ETag of 300 characters": f'"{"e" * 300}"',
        "an ETag without quotes": "e" * 40,
        "an ETag that leaves the cache": '"../../../../escaped"',
        "an ETag that leaves the blobs": '"../refs/v1"',
        "an ETag that is an absolute path": f'"{outside}/etag"',
    }.items():
        yield what, header(etag=etag)
    yield "a linked ETag that leaves the cache", header(x_linked_etag='"../../../../escaped"', x_linked_size=None)
    yield "a linked ETag that is an absolute path", header(x_linked_etag=f'"{outside}/linked"')
    yield "a linked size of 1", header(x_linked_size="1")
    yield "a Xet hash of nothing", header(x_xet_hash=NOWHERE + "0" * 24)


def wrong_commits(outside: Path) -> Named:
    for what, commit in {
        "no commit": None,
        "another commit": NOWHERE,
        "a commit that leaves the cache": "../../../../escaped",
        "a commit that is an absolute path": f"{outside}/commit",
    }.items():
        yield f"{what} of a file", header(x_repo_commit=commit)
        yield f"{what} of a missing file", {"head": missing(commit)}


def missing(commit: str | None) -> Spoil:
    def spoil(asked: Asked, answer: Answer) -> Answer:
        return Answer(404, {"x-error-code": "EntryNotFound"}).with_headers(x_repo_commit=commit)

    return spoil


def wrong_listings(variant: Path) -> Named:
    folder, honest = f"build/{variant.name}", contents(variant)
    for path in honest:
        yield f"{path} is not listed", entries(lambda listing, path=path: without(listing, f"{folder}/{path}"))
    yield "nothing is listed", {"tree": lambda asked, answer: answer.with_body(b"[]")}
    yield "no file of the variant is listed", entries(lambda listing: without(listing, folder))
    for what, file in {
        "a package that hides a module": "_ops/__init__.py",
        "a library that hides a module": "_ops.abi3.so",
        "bytecode beside its source": "__init__.pyc",
        "a module more": "more.py",
        "a folder more": "tiny/__init__.py",
        "a module that is called as torch": "torch.py",
    }.items():
        yield what, forged({f"{folder}/{file}": FOREIGN})
    yield "a foreign variant more", forged(foreign_variant(variant, PREFERRED, backend={"type": "cpu"}))
    yield "the variant under another name", forged(renamed(variant, PREFERRED))
    for key, values in {"size": (0, 1, -1, 2**62, "1", ...), "oid": (NOWHERE, "../../x", None, ...)}.items():
        yield from (
            (f"{key} {'missing' if value is ... else repr(value)}", each_entry(**{key: value})) for value in values
        )
    yield "files that are folders", each_entry(type="directory")
    yield "files of no kind", each_entry(type="socket")
    yield "a SHA-256 that is another's", each_entry(lfs={"oid": "0" * 64, "size": 1, "pointerSize": 1})
    yield "a Xet hash that is another's", each_entry(xetHash="0" * 64)
    yield "paths that are numbers", each_entry(path=7)
    yield "an object for a list", entries(lambda listing: {"files": listing})
    yield "pages without end", {"tree": endless}


def without(listing: list[dict], prefix: str) -> list[dict]:
    return [entry for entry in listing if not entry["path"].startswith(prefix)]


def renamed(variant: Path, name: str) -> dict[str, bytes]:
    return {f"build/{name}/{path}": content for path, content in contents(variant).items()}


def endless(asked: Asked, answer: Answer) -> Answer:
    return answer.with_headers(link=f'<{asked.url}>; rel="next"')


def leaving_paths(variant: Path, outside: Path) -> Named:
    folder = f"build/{variant.name}"
    for path in (
        f"{folder}/../../../../../../escaped.py",
        f"{folder}/../other/escaped.py",
        f"{folder}/..",
        f"{folder}/./escaped.py",
        f"{folder}//escaped.py",
        f"{folder}/{outside}/escaped.py",
        f"{outside}/escaped.py",
        "../../../escaped.py",
        f"{folder}\\..\\..\\escaped.py",
        f"C:\\{folder}\\escaped.py",
        f"{folder}/%2e%2e/%2e%2e/escaped.py",
        f"{folder}/a\0b.py",
    ):
        yield f"a file at {path!r}".replace(str(outside), "/outside"), forged({path: FOREIGN})


def wrong_refs(older: str) -> Iterator[tuple[str, str, Mapping[str, Spoil]]]:
    """Yield name, what the client asks for, and spoils: refs lie to versions, revisions to branches."""
    for what, commit in {
        "an older commit": older,
        "a commit of nothing": NOWHERE,
        "a commit that leaves the cache": "../../../../escaped",
        "an empty commit": "",
    }.items():
        yield f"refs name {what}", "version", {"refs": replaced("targetCommit", commit)}
        yield f"a branch is at {what}", "branch", {"revision": replaced("sha", commit)}
    yield "refs without a branch", "version", {"refs": lambda asked, answer: answer.with_body(b'{"branches": []}')}
    yield "a publisher who is not trusted", "publisher", {"overview": replaced("trustedKernelPublisher", False)}


def replaced(key: str, value: object) -> Spoil:
    """Return the spoil that gives a key of a JSON answer another value, at every depth."""

    def change(node: object) -> object:
        if isinstance(node, list):
            return [change(each) for each in node]
        if not isinstance(node, dict):
            return node
        return {name: value if name == key else change(each) for name, each in node.items()}

    def spoil(asked: Asked, answer: Answer) -> Answer:
        return answer.with_body(json.dumps(change(json.loads(answer.body))).encode())

    return spoil
