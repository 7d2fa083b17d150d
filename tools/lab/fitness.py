"""Which candidates may be launched: what the static check refuses never is, what failed its proof is not chosen."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tools.lab.candidates import PRODUCT, Launch, all_launches, capability, short
from tools.lab.items import Item, Lab
from tools.lab.records import FILE, read

STATIC_CHECK = "static check"

# Enough to see that it works, where each takes seconds.
TINY_LAUNCHES = 1


def static_check(lab: Lab) -> Item:
    """Return the item that compiles all candidates ahead, in parallel, and says which are refused.

    What is compiled here lies in Triton's cache when it is launched.
    """
    return Item(STATIC_CHECK, lambda: {"refused": examine(lab)}, 300.0)


def examine(lab: Lab) -> dict[str, list[str]]:
    """Return what is wrong with those candidates that are not fit, by their keys."""
    # Here, because it needs rich, without which the rest of the lab works.
    from tools.lint.cases import LARGE, Case, SmallPolarCase
    from tools.lint.kernels import examine_all

    def cases(launch: Launch) -> Iterable:
        config = tuple(launch.config)
        if launch.kernel == PRODUCT:
            for layout in ("wide", "square"):
                yield Case(lint_target(lab), layout, short(launch.dtype), *LARGE, False, config)
        else:
            for aligned in (True, False):
                yield SmallPolarCase(lint_target(lab), aligned, short(launch.dtype), config[0], config)

    launches = list(all_launches(lab))[: TINY_LAUNCHES if lab.tiny else None]
    pairs = [(launch.key, case) for launch in launches for case in cases(launch)][: TINY_LAUNCHES if lab.tiny else None]
    rows = examine_all(Path(lab.kernel.__file__).parent, [case for _, case in pairs], 1 if lab.tiny else None)
    found: dict[str, list[str]] = {}
    for (key, _), row in zip(pairs, rows):
        if row.problems:
            found.setdefault(key, []).extend(row.problems)
    return found


def lint_target(lab: Lab) -> str:
    """Return the GPU among those of `tools/lint/kernels.py` that has this one's limits, or is nearest below it."""
    major, minor = capability(lab)
    return {8: "sm_80", 9: "sm_90", 10: "sm_100", 11: "sm_100", 12: "sm_120"}.get(major, f"sm_{major}{minor}")


def refused(lab: Lab) -> dict[str, list[str]] | None:
    """Return what an earlier static check has refused, None if there was none."""
    for record in read(lab.out / FILE)[1]:
        if record.key == STATIC_CHECK and record.status == "ok":
            return record.value["refused"]
    return None


def fit(lab: Lab, launches: Iterable[Launch]) -> list[Launch]:
    """Return those launches that were neither refused nor failed their proof."""
    bad = set(refused(lab) or ())
    bad.update(record.key for record in read(lab.out / FILE)[1] if (record.stage, record.status) == ("prove", "failed"))
    return [launch for launch in launches if launch.key not in bad]
