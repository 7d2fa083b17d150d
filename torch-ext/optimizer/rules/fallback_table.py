"""The optimizers that may update the parameters that are not matrices: the choices of the setting `fallback`."""

from __future__ import annotations

from typing import NamedTuple

from .adamw import adamw_
from .fallback import FallbackUpdate
from .nadamw import nadamw_

# The function of torch that each of them calls, for `explain()`.
FALLBACK_KERNEL = "torch._fused_adamw_"


class Fallback(NamedTuple):
    """What there is to know about one of them."""

    name: str  # in print
    update: FallbackUpdate


FALLBACKS = {"adamw": Fallback("AdamW", adamw_), "nadamw": Fallback("NAdamW", nadamw_)}
