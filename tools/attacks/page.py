"""docs/attacks.md, made of results.json: what was tried, what became of it, and what a pin can and cannot do."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from tools.attacks.groups import Attack
from tools.build.source_tree import Revision
from tools.pages.markdown import commit_words

PAGE = Path(__file__).resolve().parents[2] / "docs/attacks.md"
RESULTS = Path(__file__).with_name("results.json")
CLIENTS = ("kernels", "huggingface_hub", "torch")
ABOUT = {
    "tampered caches": "files, links, bytecode, variants or metadata changed in the client's cache; loaded offline",
    "tampered builds": "the same in a build that is given to `tools.hub.publish`; no pin plays a part",
    "faults of the Hub": "refusals, halves, silence, garbage, portals and redirects on each of six endpoints",
    "other contents of files": "foreign Python of the same size, in GET alone or agreed on by all endpoints",
    "other metadata": "foreign code with a digest of its own, other names, versions, backends, dependencies",
    "wrong ETags": "none, one for all files, with `..`, an absolute path; also in X-Linked-ETag and X-Xet-Hash",
    "wrong commits": "X-Repo-Commit of files and of 404s",
    "wrong listings": "missing, added, renamed and mistyped entries; modules that hide others; variants",
    "paths that leave the cache": "listed paths with `..`, absolute, with backslashes, NUL, percent signs",
    "wrong refs": "versions and branches at other commits, at paths, at nothing",
    "hard conditions": "8 and 24 loads at once, a kill, a full disk, a read-only cache, umask 077, odd names",
}
TEXT = """\
# Attacks on the delivery

`make attacks` prints this table and writes this page. Each case is tried twice with the real clients: by one that
verifies with a pin before loading, and by one that calls `get_kernel` for a commit. A group with an empty cell is tried
once. Survived means that no foreign code ran, and that what was loaded is what was published, byte for byte, or
nothing: a load that fails, or waits until it is stopped, is survived. These are the results with {tried_with}.
{table}
Cases of a Hub have two loads, and both count. First a client with an empty cache meets the fault or the false answer.
Then it loads again, with the same cache, from an honest Hub. Where that cache stays spoiled, the pin refuses it until
it is deleted, and then the load succeeds. No fault of a network spoils a cache.

## What a pin defends

A pin is the sha256 of a variant's metadata.json, whose digest covers every other file. `install_kernel`, `verify`,
`get_local_kernel`, in this order, run nothing that the pin does not cover, whoever has changed the cache, the mirror,
the proxy or the repository on the Hub, and whatever the client believes to have downloaded.

## What it cannot

- **A pin taken from a bad download.** It has to come from the publisher: `tools.hub.publish` prints it.
- **What is written after the check.** Whoever can write into the cache while a program starts can exchange files
  between `verify` and the import. Let jobs read a cache that others cannot write.
- **What the client itself does** while it downloads: it writes outside of its cache for an ETag with `..`, waits for
  ever for a silent server, keeps a wrong listing. [upstream.md](upstream.md) lists this, with a report for each.
- **That a load succeeds.** A wrong answer can always prevent one.
- **Python, torch and the loader.** They are pinned by other means.
"""


def results(attacks: Iterable[Attack], revision: Revision) -> dict:
    """Return the clients' versions, the commit attacked, and how many attacks of each group were tried and survived."""
    groups: dict[str, list[Attack]] = {}
    for attack in attacks:
        groups.setdefault(attack.group, []).append(attack)
    groups["all"] = [attack for cases in groups.values() for attack in cases]
    return {
        "clients": {name: version(name) for name in CLIENTS},
        "commit": revision.commit,
        "dirty": revision.dirty,
        "groups": {group: counts(cases) for group, cases in groups.items()},
    }


def counts(cases: list[Attack]) -> dict[str, int]:
    compared = [case.without for case in cases if case.without is not None]
    survived = sum(case.survived for case in cases)
    return {"tried": len(cases), "survived": survived, "compared": len(compared), "without": sum(compared)}


def row(group: str, counted: dict[str, int]) -> tuple[str, ...]:
    """Return a group's row of the table as words."""
    without = f"{counted['without']} of {counted['compared']}" if counted["compared"] else ""
    return group, str(counted["tried"]), str(counted["survived"]), without


def page(summary: dict) -> str:
    lines = ["| group | tried | survived with the pin | survived without | what it is |", "|---|--:|--:|--:|---|"]
    for group, counted in summary["groups"].items():
        lines.append(f"| {' | '.join(row(group, counted))} | {ABOUT.get(group, '')} |")
    clients = ", ".join(" ".join(client) for client in summary["clients"].items())
    tried_with = f"{clients},\nof {commit_words(summary['commit'], summary['dirty'])}"
    return TEXT.format(tried_with=tried_with, table="\n" + "\n".join(lines) + "\n")


def write(summary: dict) -> None:
    RESULTS.write_text(json.dumps(summary, indent=1) + "\n")
    PAGE.write_text(page(summary))
