"""What tests and tools may see inside the package: every name of its middle that they use stands here.

`kernel` is the package as `get_kernel` returns it.
"""

from __future__ import annotations

from types import ModuleType
from unittest import mock

import torch
from torch import Tensor


def iterate(kernel: ModuleType, G: Tensor, dtype: torch.dtype, method: str, products: str) -> Tensor:
    """Return the polar factors of G by Polar Express on `BATCHED` products, torch's, or on `SYMMETRIC` ones."""
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    iteration = kernel.iteration.choose_iteration(G.device, dtype, tuple(sorted(G.shape[1:])), schedule, method)
    chosen = iteration._replace(gemms=getattr(kernel.kernels.gemms, products), in_one_launch=False)
    return kernel.polar.polar_factors(G, chosen, 1e-7)


def always_exchanged(kernel: ModuleType):
    """Return a patch by which a rank that is alone sends its matrices all the same."""
    return mock.patch.object(kernel.distributed.exchange_plan, "is_exchanged", lambda shards, index: True)


def steps_of(iteration) -> list[float]:
    """Return a, b, c of each step of an iteration and whether its window ends with it, as `small_polar_` takes them."""
    windows = iteration.windows
    if iteration.method == "standard":
        windows = [(step,) for step in windows[0]]
    return [float(x) for window in windows for i, step in enumerate(window, 1) for x in (*step, i == len(window))]
