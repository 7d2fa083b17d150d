"""What the Hub's builder runs over a variant passes over one without a compiled library, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.rank_pool import REPO_ID


@pytest.mark.slow
def test_a_variant_without_a_library_passes_what_every_variant_must(repository, portable_kernel):
    folder = Path(portable_kernel.__file__).parents[1]
    environment = {**os.environ, "LOCAL_KERNELS": f"{REPO_ID}={folder}"}
    command = [sys.executable, "-m", "pytest", "-m", "kernels_ci", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
