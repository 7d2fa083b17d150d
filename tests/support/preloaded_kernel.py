"""Imported once, by the process that ranks are forked from: they find the package loaded that LOCAL_KERNELS names.

To load it takes each of them a third of a second. With CUDA they load it themselves, as there nobody has tried this.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tests.support.rank_pool import load_kernel

if torch.version.cuda is None:
    load_kernel(Path(os.environ["LOCAL_KERNELS"].partition("=")[2]), "cpu")
