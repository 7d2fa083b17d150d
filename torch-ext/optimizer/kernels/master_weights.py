"""Master weights in two halves: a bfloat16 parameter, and 16 bits of state with the rest of its float32 master.

The parameter is the bfloat16 number nearest to its master; of two equally near ones it is the larger in magnitude. The
remainder is the lower half of the master's bits, read as a signed integer. The master's bits are the parameter's bits
followed by 16 zeros, plus the remainder. `optimizer_common/element.h` has the same formula for the compiled passes.

Every float32 number is restored bit for bit, even one so large that its bfloat16 is infinite. A NaN stays a NaN, but
may change its bits. A remainder of 0 means that parameter and master are equal.

Sources: modded-nanogpt, pull request 57; FlashOptim, arXiv:2602.23349, whose remainder has 8 bits and is not exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NAN, _INFINITY = 0x7FC0, 0x7F80  # in bfloat16


def joined(parameter: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master of a bfloat16 `parameter` and its int16 `remainder`, with their shape.

    Beside a zero no master leaves a negative remainder, and beside an infinity none leaves a positive one: somebody
    else has written the parameter since. Such a remainder is ignored, as the sum would be the bits of a NaN.
    """
    upper = parameter.detach().view(torch.int16)
    magnitude = upper & 0x7FFF
    stale = ((magnitude == 0) & (remainder < 0)) | ((magnitude == _INFINITY) & (remainder > 0))
    return ((upper.to(torch.int32) << 16) + remainder.masked_fill(stale, 0)).view(torch.float32)


def halves_of(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bfloat16 parameter and the int16 remainder of a float32 `master`, with its shape."""
    bits, is_nan = master.view(torch.int32), master.isnan()
    # The addition can overflow int32 only for the bits of a NaN.
    upper = ((bits + (1 << 15)) >> 16).to(torch.int16).masked_fill_(is_nan, _NAN)
    return upper.view(torch.bfloat16), bits.to(torch.int16).masked_fill_(is_nan, 0)


def split_(parameter: Tensor, remainder: Tensor, master: Tensor) -> None:
    """Write a float32 `master` into a bfloat16 `parameter` and its int16 `remainder`, in place."""
    upper, lower = halves_of(master)
    parameter.copy_(upper)
    remainder.copy_(lower)
