"""From source to a table of recipes: build, publish, load back, train with each, and write what they reach.

python -m examples.recipes [--output FILE] [--peers DIR] [--quick]
"""

from __future__ import annotations

import sys

from rich.console import Console

from ..character_model.delivery import with_published_kernel

if __name__ == "__main__":
    sys.exit(with_published_kernel(Console(), "-m", "examples.recipes.experiment", *sys.argv[1:]))
