"""Measure how exact orthogonalizations are, and make the tables and figures of docs/numerics.md from that.

    python -m tools.numerics.report [--build DIR] [--from FILE]

Takes about a minute on one core, with the same seeds each time. With --from nothing is measured: page and figures
are made from a results file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from benchmarks.built_kernel import load_built
from benchmarks.machine import describe
from benchmarks.result_file import default_path
from tools.numerics.document import filled
from tools.numerics.figures import draw_all
from tools.numerics.measurements import measure

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/numerics.md"
FIGURES = ROOT / "docs/figures"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="where the variant is, default: %(default)s")
    parser.add_argument("--from", dest="file", type=Path, help="make page and figures of this file, measure nothing")
    arguments = parser.parse_args()
    file = arguments.file.resolve() if arguments.file else measured(arguments.build)
    try:
        results, place = json.loads(file.read_text()), file.relative_to(ROOT)
        page = filled(PAGE.read_text(), results, f"../{place}")
    except (OSError, ValueError, LookupError, TypeError) as error:
        parser.error(f"{file} has no results for {PAGE.name}: {error!r}")
    PAGE.write_text(page)
    drawn = draw_all(results, FIGURES)
    print(f"{PAGE.relative_to(ROOT)} and {', '.join(drawn)} from {place}")
    return 0


def measured(build: Path) -> Path:
    """Measure the variant in `build`, on the CPU, and return the file with the results."""
    torch.set_num_threads(1)  # faster for matrices of this size, whatever else runs
    kernel, _ = load_built(build)
    device = torch.device("cpu")
    results = {**describe(kernel, device), **measure(kernel)}
    file = default_path("numerics", device)
    file.write_text(json.dumps(results, indent=1) + "\n")
    return file


if __name__ == "__main__":
    sys.exit(main())
