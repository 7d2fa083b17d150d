"""Faults of an honest Hub and of the network before it: refusals, halves, silence, pages of a portal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from tests.support.attacks.lying_hub import FOREVER, Answer, Asked, Lie, Spoil

GROUP = "faults of the Hub"
STATUSES = (401, 403, 404, 429, 500, 503)
# The endpoints of a load, with what a client asks for in order to meet them.
ASKED_BY = {
    "refs": "version",
    "revision": "branch",
    "tree": "commit",
    "head": "commit",
    "get": "commit",
    "overview": "publisher",
}
WITH_BODY = tuple(endpoint for endpoint in ASKED_BY if endpoint != "head")
PORTAL = b"<!DOCTYPE html><html><title>Sign in</title><body>Accept the terms of this network.</body></html>"


def status(code: int) -> Spoil:
    """Return the spoil that answers with an error as the Hub words it."""

    def spoil(asked: Asked, answer: Answer) -> Answer:
        body = json.dumps({"error": f"status {code}"}).encode()
        return Answer(code, {"content-type": "application/json"}, b"" if asked.endpoint == "head" else body)

    return spoil


def half(asked: Asked, answer: Answer) -> Answer:
    """Announce the whole body and hang up in its middle."""
    return replace(answer, body=answer.body[: len(answer.body) // 2])


def short(asked: Asked, answer: Answer) -> Answer:
    """Announce less than the whole body, and send that."""
    return answer.with_body(answer.body[: len(answer.body) // 2])


def long(asked: Asked, answer: Answer) -> Answer:
    return answer.with_body(answer.body + b"\n# more")


def empty(asked: Asked, answer: Answer) -> Answer:
    return answer.with_body(b"")


def hang(asked: Asked, answer: Answer) -> Answer:
    return replace(answer, wait=FOREVER, raw=b"")


def close(asked: Asked, answer: Answer) -> Answer:
    return replace(answer, raw=b"")


def close_after_head(asked: Asked, answer: Answer) -> Answer:
    return replace(answer, body=b"")


def garbage(asked: Asked, answer: Answer) -> Answer:
    return replace(answer, raw=bytes(range(256)) * 8)


def portal(asked: Asked, answer: Answer) -> Answer:
    return Answer(200, {"content-type": "text/html"}, PORTAL)


def redirect_to(target: str | None) -> Spoil:
    """Return the spoil that sends the client elsewhere; None is where it is already."""

    def spoil(asked: Asked, answer: Answer) -> Answer:
        return Answer(307, {"location": asked.url if target is None else target})

    return spoil


def faults() -> list[Lie]:
    """Return all of them, each with a name of its own."""
    cases = [
        *(Lie(f"{code} of {e}", GROUP, {e: status(code)}, by) for (e, by), code in product(ASKED_BY.items(), STATUSES)),
        *everywhere("no answer", hang, ASKED_BY),
        *everywhere("hang-up before the answer", close, ASKED_BY),
        *everywhere("half a body", half, WITH_BODY),
        *everywhere("hang-up after the head", close_after_head, ("tree", "get")),
        *everywhere("a shorter body", short, WITH_BODY),
        *everywhere("a longer body", long, ("tree", "get")),
        *everywhere("an empty body", empty, WITH_BODY),
        *everywhere("no HTTP", garbage, ("tree", "get")),
        *everywhere("a portal's page", portal, ASKED_BY),
        *everywhere("redirects without end", redirect_to(None), ("tree", "head", "get")),
        *everywhere("redirect to nothing", redirect_to("/nowhere"), ("tree", "head", "get")),
        *everywhere("redirect to a closed port", redirect_to("http://127.0.0.1:9/x"), ("head", "get")),
        *passing(),
    ]
    assert len({case.name for case in cases}) == len(cases)
    return cases


def everywhere(what: str, spoil: Spoil, endpoints: object) -> Iterator[Lie]:
    yield from (Lie(f"{what} of {endpoint}", GROUP, {endpoint: spoil}, ASKED_BY[endpoint]) for endpoint in endpoints)


def passing() -> Iterator[Lie]:
    """Faults of the first answer alone, after which a client that asks again has what it needs."""
    for endpoint, code in product(("tree", "head", "get"), (429, 503)):
        yield Lie(f"one {code} of {endpoint}", GROUP, {endpoint: status(code)}, times=1)
    for what, spoil in (("half a body", half), ("hang-up", close), ("hang", hang)):
        yield Lie(f"one {what} of get", GROUP, {"get": spoil}, times=1)
    yield Lie("one hang-up of tree", GROUP, {"tree": close}, times=1)
