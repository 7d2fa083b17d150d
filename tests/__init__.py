"""The Hub's builder puts the variant that it tests on the path, whose kernels/ hides the Hub's package of that name."""

import os
import sys
from pathlib import Path


def without_variants(folders: list[str]) -> list[str]:
    """Return `folders` but for those of built variants, which all have an `_ops.py`."""
    return [folder for folder in folders if not Path(folder, "_ops.py").is_file()]


sys.path[:] = without_variants(sys.path)
if "PYTHONPATH" in os.environ:  # for processes that tests start
    os.environ["PYTHONPATH"] = os.pathsep.join(without_variants(os.environ["PYTHONPATH"].split(os.pathsep)))
