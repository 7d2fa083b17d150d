"""Few settings in which any two values of two factors meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def pairwise(factors: Mapping[Any, Sequence[Any]], seed: int) -> list[dict[Any, Any]]:
    """Return settings, one value of each factor, such that any two values of two factors meet in one of them."""
    draw = random.Random(seed)
    open_pairs = {
        frozenset(((one, a), (other, b)))
        for one, other in itertools.combinations(factors, 2)
        for a in range(len(factors[one]))
        for b in range(len(factors[other]))
    }
    rows = []
    while open_pairs:
        some = dict(draw.choice(sorted(map(sorted, open_pairs))))
        tries = [
            {name: some.get(name, draw.randrange(len(values))) for name, values in factors.items()} for _ in range(50)
        ]
        best = max(tries, key=lambda row: len(open_pairs & _pairs(row)))
        open_pairs -= _pairs(best)
        rows.append({name: factors[name][i] for name, i in best.items()})
    return rows


def in_turn(values: Iterable[Any], others: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return each of `values` with one of `others`, which take turns: for pairs that other tests let meet."""
    return list(zip(values, itertools.cycle(others)))


def alike_and_pairwise(values: Sequence[Any], places: int) -> list[tuple[Any, ...]]:
    """Return rows of `places` values: one value everywhere, and rows in which any two meet in any two places."""
    rows = pairwise({place: values for place in range(places)}, seed=0)
    return [(value,) * places for value in values] + [tuple(row.values()) for row in rows]


def _pairs(row: Mapping[Any, int]) -> set[frozenset]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
