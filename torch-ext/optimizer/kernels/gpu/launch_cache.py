"""Fast launches of the symmetric product: everything about a launch except addresses and scalars is looked up.

At each `kernel[grid](...)` Triton works out again which compiled kernel fits the arguments, and choosing a
configuration takes about as long. Neither result can change between launches on operands of the same geometry (shapes,
strides, dtype, alignment). So the first launch stores the compiled kernel with its arguments, and later launches
start that kernel (`triton_starts.py`).
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Hashable, Optional

import torch
from torch import Tensor
from triton.runtime.driver import driver

from ..speeds.measurements import Ranks, changed
from .hopper_gemm import hopper_product
from .symmetric_gemm import Launch, arrange, chosen_for, launch_symmetric_gemm, symmetric_gemm
from .triton_errors import in_a_line
from .triton_starts import starter
from .tuned import COMPILED

# How many geometries are remembered. A step has a few dozen; a program whose shapes keep changing empties the table now
# and then.
MAX_STARTS = 4096

# Launches the product on operands of one geometry: A, B, D (or C where there is none), C, alpha, beta, diagonal.
Start = Callable[[Tensor, Tensor, Tensor, Tensor, float, float, float], None]

_STARTS: dict[Hashable, Start] = {}


def symmetric_product(
    A: Tensor,
    B: Tensor,
    D: Optional[Tensor] = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    out: Optional[Tensor] = None,
    diagonal: float = 0.0,
    among: Optional[Ranks] = None,
) -> Tensor:
    """Return what `symmetric_gemm` returns, for operands that are known to fit: they are not checked.

    `among` has the ranks that share the matrices: the launch is one that they have agreed on. Traced or fake tensors
    and CPU tensors go through the custom op `symmetric_gemm_`; no step of matrices that ranks share is traced.
    """
    if torch.compiler.is_compiling() or not can_launch_on(A):
        return symmetric_gemm(A, B, D, alpha, beta, out, diagonal)
    batch, m, _ = A.shape
    C = A.new_empty(batch, m, m) if out is None else out
    if A.get_device() == torch.cuda.current_device():
        launch(A, B, D, C, alpha, beta, diagonal, among)
    else:
        with torch.cuda.device(A.device):  # Triton launches on the current device, not on that of the arguments
            launch(A, B, D, C, alpha, beta, diagonal, among)
    return C


@functools.cache
def launch_fault() -> str:
    """Return why Triton cannot launch anything on the GPUs of this machine, "" if it can.

    What launches is compiled with the system's C compiler and Python's headers, which images made for deployment lack.
    The answer holds for the process, so that choices do not change in it.
    """
    try:
        driver.active.utils  # noqa: B018  made when it is first read
    except Exception as error:  # Triton raises errors of any class
        return in_a_line(error)
    return ""


def can_launch_on(A: Tensor) -> bool:
    """Whether A is a real tensor on a GPU, neither fake nor seen by a dispatch mode that records operations."""
    return type(A) is Tensor and A.is_cuda and not torch._C._len_torch_dispatch_stack()


def launch(
    A: Tensor,
    B: Tensor,
    D: Optional[Tensor],
    C: Tensor,
    alpha: float,
    beta: float,
    diagonal: float,
    among: Optional[Ranks] = None,
) -> None:
    """Write alpha A B + beta D + diagonal I into C on the current device; nothing is checked."""
    d = C if D is None else D
    geometry = _geometry(A, B, D, C, among)
    start = _STARTS.get(geometry)
    if start is not None:
        start(A, B, d, C, alpha, beta, diagonal)
        return
    config = chosen_for(A, B, D, C, among)
    compiled = launch_symmetric_gemm(A, B, D, C, (alpha, beta, diagonal), config)
    if config in COMPILED:
        start = _start_of_compiled(config.sections)
    elif compiled is None:  # an empty product, or Triton's interpreter, which compiles nothing
        return
    else:
        start = prepare(A, B, arrange(A, B, D, C, config), compiled)
    if len(_STARTS) >= MAX_STARTS:
        _STARTS.clear()
    _STARTS[geometry] = start


def _start_of_compiled(sections: int) -> Start:
    def start(A: Tensor, B: Tensor, D: Tensor, C: Tensor, alpha: float, beta: float, diagonal: float) -> None:
        hopper_product(A, B, None if D is C else D, alpha, beta, C, diagonal, sections)

    return start


def prepare(A: Tensor, B: Tensor, arranged: Launch, compiled: Any) -> Start:
    """Combine `arranged` with what Triton `compiled` for it; valid for operands laid out like A and B."""
    described = [x if x.stride(2) == 1 else x.mT for x in (A, B.mT)] if arranged.blocks else []
    panels = [(list(x.shape), list(x.stride())) for x in described]
    begin, rest = starter(compiled, arranged.grid, panels), (*arranged.sizes, *arranged.constants)

    def start(A: Tensor, B: Tensor, D: Tensor, C: Tensor, alpha: float, beta: float, diagonal: float) -> None:
        stream = driver.active.get_current_stream(A.get_device())
        addresses = A.data_ptr(), B.data_ptr(), D.data_ptr(), C.data_ptr()
        begin(stream, *addresses, alpha, beta, diagonal, *rest)

    return start


def _geometry(A: Tensor, B: Tensor, D: Optional[Tensor], C: Tensor, among: Optional[Ranks] = None) -> Hashable:
    """Return a key of everything that a launch depends on.

    Of an address only its alignment to 16 bytes matters. `changed()` is in the key because a new measurement may choose
    another configuration.
    """
    strides, addresses = A.stride(), A.data_ptr() | C.data_ptr()
    other, addend = strides, strides
    if B is not A:
        other, addresses = B.stride(), addresses | B.data_ptr()
    if D is None:
        addend = None
    elif D is not A:
        addend, addresses = D.stride(), addresses | D.data_ptr()
    offsets: Hashable = addresses & 15
    if offsets:  # rare: some operand is unaligned, and then the key must say which
        offsets = tuple(x is not None and x.data_ptr() % 16 for x in (A, B, D, C))
    return A.shape, strides, other, C.stride(), addend, A.dtype, A.get_device(), offsets, among, changed()
