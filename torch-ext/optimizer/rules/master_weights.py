"""Master weights in two halves: a bfloat16 parameter, and in 16 bits of state what float32 has beyond it.

The parameter is the bfloat16 nearest to its float32 master, of two the one with the larger absolute value. The
remainder is the lower half of the master's bits, read as a signed integer: the bits of the master are those of the
parameter, followed by 16 zeros, plus the remainder. `optimizer_common/element.h` has the same formula for the compiled
passes.

Every float32 number comes back with its bits, also one so large that its bfloat16 is infinite. Of a NaN only that it is
one is kept. A remainder of 0 says that the parameter is the master.

Sources: modded-nanogpt, pull request 57; FlashOptim, arXiv:2602.23349, whose remainder has 8 bits and is not exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NAN = 0x7FC0  # in bfloat16


def joined(parameter: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master of a bfloat16 `parameter` and its int16 `remainder`, of their shape."""
    bits = parameter.detach().view(torch.int16).to(torch.int32) << 16
    return (bits + remainder).view(torch.float32)


def split_(parameter: Tensor, remainder: Tensor, master: Tensor) -> None:
    """Write a float32 `master` into a bfloat16 `parameter` and its int16 `remainder`, in place."""
    bits, is_nan = master.view(torch.int32), master.isnan()
    # Only a NaN's bits could leave the range of int32.
    upper = ((bits + (1 << 15)) >> 16).to(torch.int16).masked_fill_(is_nan, _NAN)
    parameter.copy_(upper.view(torch.bfloat16))
    remainder.copy_(bits.to(torch.int16).masked_fill_(is_nan, 0))
