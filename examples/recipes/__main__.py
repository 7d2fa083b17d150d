"""From source to a table of recipes: build, publish, load back, train with each, and write what they reach.

python -m examples.recipes [--output FILE] [--peers DIR] [--quick]

A second run of the same day, or with the same --output, goes on where the first one ended. A recipe whose package is
missing is marked so. What --quick finds is written only where --output says.
"""

from __future__ import annotations

import sys

from rich.console import Console

from ..character_model.delivery import with_published_kernel
from .experiment import parsed_arguments

if __name__ == "__main__":
    parsed_arguments(__doc__)  # before the build, which help and mistakes need not wait for
    sys.exit(with_published_kernel(Console(), "-m", "examples.recipes.experiment", *sys.argv[1:]))
