"""The symmetric product as a step launches it: all but addresses and scalars is looked up by how its operands lie.

At each `kernel[grid](...)` Triton finds out again what a launch needs compiled, and the choice of a configuration takes
about as long. Neither can change between launches on operands of the same geometry, so the first one is kept: what
Triton compiled, and its arguments. The next one goes straight to Triton's launcher.
"""

from __future__ import annotations

from typing import Any, Callable, Hashable, NamedTuple, Optional

import torch
from torch import Tensor
from triton.runtime.driver import driver

from .hopper_gemm import hopper_product
from .measurements import changed
from .symmetric_gemm import Launch, arrange, chosen_for, launch_symmetric_gemm, symmetric_gemm
from .tuned import HOPPER

# Geometries that are remembered: a step has a few dozen. A program with ever new ones empties the table at times.
MAX_PREPARED = 4096


class Panel(NamedTuple):
    """What Triton's launcher reads of a `TensorDescriptor`, without the checks that making one repeats."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


class Prepared(NamedTuple):
    """A compiled kernel for operands of one geometry."""

    start: Callable[..., None]  # Triton's launcher
    grid: tuple[int, int, int]
    kernel: tuple[Any, ...]  # the loaded function and what the launcher is told of it; no hooks
    panels: tuple[tuple[list[int], list[int]], ...]  # shape and strides of those that are described
    rest: tuple[Any, ...]  # the arguments behind the scalars

    def __call__(self, A: Tensor, B: Tensor, D: Tensor, C: Tensor, alpha: float, beta: float) -> None:
        """Write alpha A B + beta D into C; D is C itself where there is none."""
        if self.panels:
            A, B = Panel(A, *self.panels[0]), Panel(B, *self.panels[1])
        active = driver.active
        stream = active.get_current_stream(active.get_current_device())
        self.start(*self.grid, stream, *self.kernel, A, B, D, C, alpha, beta, *self.rest)


# What launches on operands of a geometry: A, B, D or C where there is none, C, alpha, beta.
Start = Callable[[Tensor, Tensor, Tensor, Tensor, float, float], None]

_PREPARED: dict[Hashable, Start] = {}


def symmetric_product(
    A: Tensor,
    B: Tensor,
    D: Optional[Tensor] = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    out: Optional[Tensor] = None,
) -> Tensor:
    """Return what `symmetric_gemm` does, for operands that are known to fit: they are not checked.

    What is traced, made up by a tracer or on a CPU goes the way of the op, `symmetric_gemm_`.
    """
    if torch.compiler.is_compiling() or not can_launch_on(A):
        return symmetric_gemm(A, B, D, alpha, beta, out)
    C = A.new_empty(A.size(0), A.size(1), A.size(1)) if out is None else out
    if A.get_device() == torch.cuda.current_device():
        launch(A, B, D, C, alpha, beta)
    else:
        with torch.cuda.device(A.device):  # Triton launches on the current device, wherever its arguments are
            launch(A, B, D, C, alpha, beta)
    return C


def can_launch_on(A: Tensor) -> bool:
    """Whether A is on a GPU, no tensor that a tracer has made up, and nobody records what is done to it."""
    return type(A) is Tensor and A.is_cuda and not torch._C._len_torch_dispatch_stack()


def launch(A: Tensor, B: Tensor, D: Optional[Tensor], C: Tensor, alpha: float, beta: float) -> None:
    """Write alpha A B + beta D into C on the current device; nothing is checked."""
    d = C if D is None else D
    geometry = _geometry(A, B, D, C)
    prepared = _PREPARED.get(geometry)
    if prepared is not None:
        return prepared(A, B, d, C, alpha, beta)
    config = chosen_for(A, B, D, C)
    compiled = launch_symmetric_gemm(A, B, D, C, (alpha, beta), config)
    if config == HOPPER:
        start = _start_hopper_product
    elif compiled is None:  # nothing to do, or in Triton's interpreter, which compiles nothing
        return None
    else:
        start = prepare(A, B, arrange(A, B, D, C, False, config), compiled)
    if len(_PREPARED) >= MAX_PREPARED:
        _PREPARED.clear()
    _PREPARED[geometry] = start
    return None


def _start_hopper_product(A: Tensor, B: Tensor, D: Tensor, C: Tensor, alpha: float, beta: float) -> None:
    hopper_product(A, B, None if D is C else D, alpha, beta, C)


def prepare(A: Tensor, B: Tensor, launch: Launch, compiled: Any) -> Prepared:
    """Return `launch` of what Triton `compiled` for it, for operands that lie like A and B."""
    described = [x if x.stride(2) == 1 else x.mT for x in (A, B.mT)] if launch.blocks else []
    panels = tuple((list(x.shape), list(x.stride())) for x in described)
    loaded = compiled.function, compiled.packed_metadata, None, None, None
    return Prepared(compiled.run, launch.grid, loaded, panels, (*launch.sizes, *launch.constants))


def _geometry(A: Tensor, B: Tensor, D: Optional[Tensor], C: Tensor) -> Hashable:
    """Return all that a launch depends on besides addresses, of which only those that are not by 16 bytes matter.

    What was measured in between may have changed the configuration.
    """
    if D is None:
        addend, offsets = None, (A.data_ptr() | B.data_ptr() | C.data_ptr()) & 15
    else:
        addend, offsets = D.stride(), (A.data_ptr() | B.data_ptr() | C.data_ptr() | D.data_ptr()) & 15
    if offsets:  # rare, and then it matters which
        offsets = tuple(x is not None and x.data_ptr() % 16 for x in (A, B, D, C))
    return A.shape, A.stride(), B.stride(), C.stride(), addend, A.dtype, A.get_device(), offsets, changed()
