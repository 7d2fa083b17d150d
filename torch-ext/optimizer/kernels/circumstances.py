"""What the choice of products and of an iteration depends on besides the matrices."""

from __future__ import annotations

from typing import NamedTuple, Optional


class Circumstances(NamedTuple):
    """By default one process chooses alone, for a call that nothing transforms, in a dtype that was asked for."""

    transformed: bool = False  # by autograd or torch.func; see `tracing.is_transformed`
    among: Optional[tuple[int, ...]] = None  # ranks that must make the same choice; see `measurements.measured_here`
    default_dtype: bool = False  # the work dtype is the device's default: nobody asked for its digits
    table: Optional[str] = None  # of `products.cpu_tables`: the one to take on a CPU, whatever was measured


ALONE = Circumstances()
