"""From source to result in a few minutes: build, verify, publish, load back, train, compare, draw.

python -m examples.character_model [--output out/demo] [--quick]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from .delivery import CommandError, call, published_kernel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/demo"), help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs; proves nothing")
    arguments = parser.parse_args()
    console = Console()
    experiment = ["-m", "examples.character_model.experiment", "--output", arguments.output.resolve()]
    try:
        with tempfile.TemporaryDirectory() as folder, published_kernel(console, Path(folder)) as environment:
            # A process of its own, as a user's would be: the Hub's clients read their environment on import.
            call(console, *experiment, *(["--quick"] if arguments.quick else []), environment=environment)
    except CommandError as failure:
        console.print(f"[bold red]The demonstration failed:[/] {failure}", highlight=False, soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
