"""Imported once, by the process that ranks are forked from: they find the package loaded that LOCAL_KERNELS names.

To load it takes each of them a third of a second. Where torch is for GPUs each loads it itself: a forked process cannot
use a GPU that its parent has asked for.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

from tests.support.rank_pool import REPO_ID, load_kernel

entries = dict(entry.split("=", 1) for entry in os.environ.get("LOCAL_KERNELS", "").split(":") if "=" in entry)
if REPO_ID in entries and torch.version.cuda is None and torch.version.hip is None:
    with contextlib.suppress(Exception):  # else the process would end; a rank that loads it itself says what is wrong
        load_kernel(Path(entries[REPO_ID]))
