"""From source to a table of recipes: build, publish, load back, train with each, and write what they reach.

python -m examples.recipes [--output FILE] [--peers DIR] [--quick]
"""

from __future__ import annotations

import sys

from rich.console import Console

from ..character_model.delivery import with_published_kernel
from .experiment import parsed_arguments

if __name__ == "__main__":
    parsed_arguments()  # before the build, which help and mistakes need not wait for
    sys.exit(with_published_kernel(Console(), "-m", "examples.recipes.experiment", *sys.argv[1:]))
