"""Imported once, by the process that ranks are forked from: they find the package loaded that LOCAL_KERNELS names.

To load it takes each of them a third of a second. Where torch is for GPUs each loads it itself: a forked process cannot
use a GPU that its parent has asked for.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from tests.support.rank_pool import REPO_ID, load_kernel, local_kernels

folders = local_kernels()
if REPO_ID in folders and torch.version.cuda is None and torch.version.hip is None:
    with contextlib.suppress(Exception):  # else the process would end; a rank that loads it itself says what is wrong
        load_kernel(Path(folders[REPO_ID]))
