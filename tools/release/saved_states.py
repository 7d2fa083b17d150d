"""Write the state file of a built version, which later versions load in tests/muon/test_older_states.py.

    python -m tools.release.saved_states build tests/golden/states/format-2.json

Do it once for each format: before `STATE_FORMAT` is raised, with a build of the last commit that has the old one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from pathlib import Path

from benchmarks.built_kernel import find_variant, load_variant, read_metadata
from tests.support.saved_states import CASES, plain, record


def saved_states(build: Path, cases: Collection[str]) -> str:
    """Return the content of a state file: what a built version makes of these cases."""
    variant = find_variant(build)
    kernel = load_variant(variant)
    commit = read_metadata(variant)["provenance"]["kernel"]["commit"]
    lines = [f"{json.dumps(case)}: {json.dumps(plain(record(kernel, case)))}" for case in cases]
    return f'{{"commit": "{commit}", "cases": {{\n' + ",\n".join(lines) + "\n}}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, help="a folder of variants")
    parser.add_argument("output", type=Path)
    parser.add_argument("--case", action="append", choices=CASES, help="may be repeated; default: all")
    arguments = parser.parse_args()
    arguments.output.write_text(saved_states(arguments.build, arguments.case or CASES))


if __name__ == "__main__":
    main()
