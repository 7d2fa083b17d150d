"""The optimizers that may update the parameters that are not matrices: the choices of the setting `fallback`."""

from __future__ import annotations

from typing import NamedTuple

from .adamw import adamw_
from .fallback import FallbackUpdate
from .nadamw import nadamw_


class Fallback(NamedTuple):
    """What there is to know about one of them."""

    name: str  # in print
    update: FallbackUpdate
    kernel: str  # the function of torch that it calls, for `explain()`
    implementation: str  # torch's argument that asks for such functions: `fused` or `foreach`


FALLBACKS = {
    "adamw": Fallback("AdamW", adamw_, "torch._fused_adamw_", "fused"),
    "nadamw": Fallback("NAdamW", nadamw_, "torch._foreach_*", "foreach"),
}
