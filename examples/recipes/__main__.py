"""From source to a table of recipes: build, publish, load back, train with each, and write what they reach.

python -m examples.recipes [--output FILE] [--peers DIR] [--quick]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rich.console import Console

from ..character_model.delivery import CommandError, call, published_kernel


def main() -> int:
    console = Console()
    try:
        with tempfile.TemporaryDirectory() as folder, published_kernel(console, Path(folder)) as environment:
            call(console, "-m", "examples.recipes.experiment", *sys.argv[1:], environment=environment)
    except CommandError as failure:
        console.print(f"[bold red]The comparison failed:[/] {failure}", highlight=False, soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
