"""From source to result in a few minutes: build, verify, publish, load back, train, compare, draw.

python -m examples.character_model [--output out/demo] [--quick]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from .delivery import with_published_kernel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/demo"), help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs; proves nothing")
    arguments = parser.parse_args()
    experiment = ["-m", "examples.character_model.experiment", "--output", arguments.output.resolve()]
    return with_published_kernel(Console(), *experiment, *(["--quick"] if arguments.quick else []))


if __name__ == "__main__":
    sys.exit(main())
