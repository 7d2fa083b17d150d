"""Requests, answers, and the table that says which function answers which request."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote

from tools.hub.store import HubError, Repository, Store

SMALL_BODY = 4 << 20  # bytes; preupload sends up to 256 paths with 512 bytes of each file


@dataclass(frozen=True)
class Site:
    """What the functions answer from."""

    store: Store
    trusted: frozenset[str]


@dataclass(frozen=True)
class Request:
    site: Site
    url: str  # scheme and host, as the client reached them
    path: dict[str, str]
    query: dict[str, list[str]]
    range: str | None
    body: bytes

    @property
    def repository(self) -> Repository:
        return self.site.store.repository(self.path["organization"], self.path["name"])

    @property
    def repo_id(self) -> str:
        return f"{self.path['organization']}/{self.path['name']}"

    def flag(self, name: str) -> bool:
        return self.query.get(name, [""])[-1].lower() in ("1", "true")

    def json(self, **fields: type) -> list[Any]:
        """Return the named fields of the JSON object in the body, each None or of its type."""
        return pick(parse_json(self.body), **fields)


@dataclass(frozen=True)
class Answer:
    content: Any = field(default_factory=dict)  # bytes, or something to write as JSON
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class Route(NamedTuple):
    method: str
    pattern: re.Pattern[str]
    function: Callable[[Request], Answer]
    body_limit: int


class Routes:
    """Functions by method and path. In a template {word} is one part of a path, {word...} all that is left of it."""

    def __init__(self) -> None:
        self._routes: list[Route] = []

    def get(self, template: str) -> Callable:
        return self._adder("GET", template, SMALL_BODY)

    def post(self, template: str, body_limit: int = SMALL_BODY) -> Callable:
        return self._adder("POST", template, body_limit)

    def find(self, method: str, target: str) -> tuple[Route, dict[str, str], dict[str, list[str]]]:
        """Return the route, the parts of the path by name, and the query; HEAD is a GET.

        Parts are decoded after the path is split, so that an encoded slash stays inside its part.
        """
        path, _, query = target.partition("?")
        matches = [(route, match) for route in self._routes if (match := route.pattern.fullmatch(path))]
        if not matches:
            raise HubError(404, f"nothing is served at {path}")
        wanted = "GET" if method == "HEAD" else method
        route, match = next((pair for pair in matches if pair[0].method == wanted), (None, None))
        if route is None:
            raise HubError(405, f"{path} takes {matches[0][0].method}, not {method}")
        try:
            parts = {name: unquote(part, errors="strict") for name, part in match.groupdict().items()}
        except UnicodeDecodeError:
            raise HubError(400, f"the path is not UTF-8: {path}") from None
        return route, parts, parse_qs(query)

    def _adder(self, method: str, template: str, body_limit: int) -> Callable:
        pattern = re.sub(r"\{(\w+)\.\.\.\}", r"(?P<\1>.+)", template)
        pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", pattern)

        def add(function: Callable[[Request], Answer]) -> Callable[[Request], Answer]:
            self._routes.append(Route(method, re.compile(pattern), function, body_limit))
            return function

        return add


def parse_json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise HubError(400, f"not JSON: {error}") from None


def pick(mapping: Any, **fields: type) -> list[Any]:
    """Return the named fields, each None or of its type."""
    if not isinstance(mapping, dict):
        raise HubError(400, f"need a JSON object, got {type(mapping).__name__}")
    values = [mapping.get(name) for name in fields]
    for (name, kind), value in zip(fields.items(), values):
        if value is not None and not isinstance(value, kind):
            raise HubError(400, f"{name} must be of type {kind.__name__}, got {type(value).__name__}")
    return values
