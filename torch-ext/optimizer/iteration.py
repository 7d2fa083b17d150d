"""How matrices of one size are orthogonalized on one device: method, dtypes, schedule, products."""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .kernels.capabilities import check_device
from .kernels.circumstances import ALONE, Circumstances
from .kernels.formats import dtype_name, exact_dtype, float32_roundoffs, torch_is_slow, unit_roundoff
from .kernels.native_products import bfloat16_is_faster
from .kernels.products import SINGLE, Products, select_products, small_choice, with_torchs_affine
from .schedules import Schedule, with_folded_scale
from .stability import MAX_WINDOWS, folded_scale, safe_restarts, split

# The dtypes in which matrices may be stored and multiplied.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

METHODS = ("auto", "standard", "gram", "gram_float32")

CPU_WORK_DTYPE = torch.bfloat16 if bfloat16_is_faster() else torch.float32

# With fewer steps the Gram iteration saves nothing in bfloat16: its first step is one of the standard iteration.
_GRAM_STEPS = 4
# By default a CPU takes it from twice as many columns as rows on. With fewer than `_SHORT_SIDE` rows it needs
# `_LONG_SIDE` columns, because shorter matrices often take longer with torch's products, which portable variants have.
_SHORT_SIDE, _LONG_SIDE = 64, 512


class Iteration(NamedTuple):
    """How matrices of one size are orthogonalized. Chosen once, by device, dtype and size, never by their number."""

    method: str  # one of METHODS, not auto
    windows: tuple[Schedule, ...]  # the steps; in the Gram iteration each window starts with a new Gram matrix
    scale: float  # the factor of normalised matrices; it is folded into the windows
    work_dtype: torch.dtype
    chain_dtype: torch.dtype  # of the Gram iteration's m x m matrices
    products: Products
    in_one_launch: bool = False  # one kernel does everything: `kernels.gpu.small_polar`

    def __str__(self) -> str:
        windows = f"[{'+'.join(str(len(window)) for window in self.windows)}]" if len(self.windows) > 1 else ""
        name = "small_polar" if self.in_one_launch else self.products.name
        return f"{self.method}{windows} {name} {dtype_name(self.work_dtype)}"

    @property
    def squares(self) -> tuple[int, torch.dtype]:
        """How many m x m matrices, and of which dtype, a caller may pass as memory for each matrix."""
        if self.in_one_launch:
            return 0, self.work_dtype
        if self.method == "standard":
            return 2, self.work_dtype
        return 4 if self.products.gram_newton_schulz is not None else 0, self.chain_dtype

    @property
    def one_at_a_time(self) -> bool:
        """Whether a call works on one matrix, without a batch dimension, because the products take only one."""
        return not self.products.batched and not self.in_one_launch

    @property
    def gram_windows(self) -> tuple[Schedule, ...]:
        """The steps from each Gram matrix to the next: those of a window, or one in the standard iteration."""
        return tuple((step,) for step in self.windows[0]) if self.method == "standard" else self.windows

    @property
    def explained(self) -> str:
        """The iteration in words, and how its products were chosen."""
        return f"{self}, {self.products.source}" if self.products.source else str(self)


class _Case(NamedTuple):
    """What an iteration is chosen for; `size` is m, n with m <= n."""

    device: torch.device
    work_dtype: torch.dtype
    size: tuple[int, int]
    schedule: Schedule
    circumstances: Circumstances


def choose_iteration(
    device: torch.device,
    work_dtype: torch.dtype,
    size: tuple[int, int],
    schedule: Schedule,
    method: str = "auto",
    circumstances: Circumstances = ALONE,
) -> Iteration:
    """Return how m x n matrices of `size`, m <= n, are orthogonalized on `device`.

    `auto` takes the Gram iteration where `_auto_may_use_gram` allows it and it costs less (`iteration_costs`). In
    bfloat16 it would diverge; `gram_float32` would not. `auto` takes that if `select_products` has products for it and
    there are at least _GRAM_STEPS steps. Small matrices run in one launch if that was measured to be faster.

    Raises ValueError for an unknown method, for one that is not safe in this dtype with this schedule, and for a GPU
    that this build has no code for.
    """
    check_device(device)
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    case = _Case(device, work_dtype, size, schedule, circumstances)
    decided, of_work_dtype = _method_by_products(case, method)
    chain_dtype = _chain_dtype(work_dtype, decided)
    products = _products_of_steps(case, chain_dtype, of_work_dtype)
    restarts = _restarts_of_method(case, decided, chain_dtype, products)
    scale = folded_scale(work_dtype, size[0], schedule)
    folded = with_folded_scale(schedule, scale)
    small = small_choice(device, work_dtype, *size, circumstances.among)
    in_one_launch = chain_dtype == work_dtype and not circumstances.transformed and (small.gain or 0) >= 1
    named = products._replace(source=small.source) if in_one_launch else products
    if restarts is None:
        return Iteration("standard", (folded,), scale, work_dtype, chain_dtype, named, in_one_launch)
    gram = "gram" if decided == "auto" else decided
    return Iteration(gram, split(folded, restarts), scale, work_dtype, chain_dtype, named, in_one_launch)


def _method_by_products(case: _Case, method: str) -> tuple[str, Products]:
    """Return the method, still `auto` where `_restarts_of_method` decides, and the products for its work dtype."""
    device, work_dtype, size, schedule, circumstances = case
    products = select_products(device, work_dtype, *size, circumstances, method)
    if method != "auto" or not products.float32_squares:
        return method, products
    is_safe = safe_restarts(schedule, work_dtype, _roundoff(device, torch.float32, products)) is not None
    if is_safe and len(schedule) >= _GRAM_STEPS:
        return "gram_float32", products
    return "standard", select_products(device, work_dtype, *size, circumstances, "standard")


def _products_of_steps(case: _Case, chain_dtype: torch.dtype, of_work_dtype: Products) -> Products:
    """Return the products of an iteration: those in the work dtype if they can multiply its m x m matrices, too."""
    if chain_dtype == case.work_dtype or of_work_dtype.float32_squares:
        return of_work_dtype
    return with_torchs_affine(select_products(case.device, chain_dtype, *case.size, case.circumstances, "standard"))


def _restarts_of_method(
    case: _Case, method: str, chain_dtype: torch.dtype, products: Products
) -> Optional[tuple[int, ...]]:
    """Return the steps before which the Gram iteration restarts; None stands for the standard iteration.

    Raises ValueError if it would have to restart too often, unless the method is `auto`.
    """
    device, work_dtype, size, schedule, _ = case
    if method == "standard" or (method == "auto" and not _auto_may_use_gram(case, products)):
        return None
    stands_in = method == "auto" and work_dtype == torch.float32
    restarts = safe_restarts(schedule, work_dtype, _roundoff(device, chain_dtype, products), stands_in)
    if restarts is None and method != "auto":
        raise ValueError(
            f"method {method!r} is not safe for this schedule of {len(schedule)} steps in {chain_dtype} with up to "
            f"{MAX_WINDOWS} windows{_blame_of_rounding(schedule, work_dtype, chain_dtype)}: use "
            f"{'gram_float32 or ' if method == 'gram' and work_dtype == torch.bfloat16 else ''}standard"
        )
    if restarts is None or method != "auto":
        return restarts
    standard, gram = iteration_costs(*size, len(schedule), len(restarts) + 1, products)
    return restarts if gram < standard else None


def summed_iteration(
    device: torch.device,
    work_dtype: torch.dtype,
    size: tuple[int, int],
    schedule: Schedule,
    method: str,
    circumstances: Circumstances = ALONE,
) -> Optional[Iteration]:
    """Return the iteration of ranks that each have some columns and sum a Gram matrix: `gram` or `gram_float32`.

    None if it is not safe with this schedule; for float64, because it would lose digits; and on a device without
    float64, because ranks sum squared norms in it.
    """
    roundoff = _roundoff(device, _chain_dtype(work_dtype, method), SINGLE)
    is_safe = safe_restarts(schedule, work_dtype, roundoff) is not None
    if work_dtype == torch.float64 or exact_dtype(device) != torch.float64 or not is_safe:
        return None
    return choose_iteration(device, work_dtype, size, schedule, method, circumstances)


def iteration_costs(m: int, n: float, steps: int, windows: int, products: Products) -> tuple[float, float]:
    """Return the costs of the standard and of the Gram iteration, in FLOPs at the speed of torch's products.

    With symmetric products at twice that speed (both gains 2) they are steps (3 m² n + m³) and
    4 steps m³ + 3 windows m² (n - m).
    """
    dense = 2 * m * m * n
    gram, square = dense / products.gram_gain, 2 * m**3 / products.square_gain
    squares = 4 * steps - 3 * windows  # a window of w steps has 4 w - 3 products of two m x m matrices
    return steps * (gram + square + dense), windows * (gram + dense) + squares * square


def default_work_dtype(G: Tensor) -> torch.dtype:
    """Return the default dtype of the products for matrices like G.

    float64 matrices keep theirs. Others use float16 on CUDA devices: it has three more bits than bfloat16, and
    normalised matrices do not need bfloat16's range. CPUs use bfloat16 if they multiply it faster than float32,
    and else float32.
    """
    if G.dtype == torch.float64:
        return torch.float64
    return {"cuda": torch.float16, "cpu": CPU_WORK_DTYPE}.get(G.device.type, torch.float32)


def check_work_dtype(
    dtype: Optional[torch.dtype], device: Optional[torch.device] = None, key: str = "dtype"
) -> Optional[torch.dtype]:
    """Return `dtype`. ValueError, which names the `key`, unless it is one of DTYPES, and `device` can multiply it."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"{key} must be one of {', '.join(map(str, DTYPES))} or None, got {dtype!r}")
    if device is not None and dtype is not None and exact_dtype(device, dtype) != dtype:
        raise ValueError(f"{device} cannot multiply matrices in {dtype}")
    return dtype


def _auto_may_use_gram(case: _Case, products: Products) -> bool:
    """Whether `auto` may take the Gram iteration: in float16, and on a CPU in float32 that nobody asked for.

    Users ask for float32 for its digits, of which the Gram iteration loses up to three. As a CPU's default it stands in
    for half precision, and `safe_restarts` keeps its errors below those. Derivatives keep their digits, too. Among
    products that keep float32 the size alone decides, so choosing by time changes roundings only. From twice as many
    columns as rows on, five steps of `gemm_` save at least a third of the FLOPs, which pays for more products.
    """
    device, work_dtype, (m, n), _, circumstances = case
    long_side = 2 * m if m >= _SHORT_SIDE else _LONG_SIDE
    is_default = device.type == "cpu" and circumstances.default_dtype and not circumstances.transformed
    stands_in = is_default and work_dtype == torch.float32 and _keeps_float32(products)
    return work_dtype == torch.float16 or (stands_in and n >= long_side)


def _keeps_float32(products: Products) -> bool:
    """Whether a CPU's products never round float32 factors. torch's may, by its settings."""
    return products.gram is not SINGLE.gram or torch_is_slow(torch.bfloat16)


def _chain_dtype(work_dtype: torch.dtype, method: str) -> torch.dtype:
    return torch.promote_types(work_dtype, torch.float32) if method == "gram_float32" else work_dtype


def _roundoff(device: torch.device, chain_dtype: torch.dtype, products: Products) -> float:
    """Return the relative rounding of the m x m matrices that `products` multiply.

    A user may let torch round factors in float32 products. `gemm_` never does, nor does torch on CPUs without bfloat16.
    """
    exact = chain_dtype != torch.float32 or device.type == "mps" or (device.type == "cpu" and _keeps_float32(products))
    if exact:
        return unit_roundoff(chain_dtype)
    on_cuda, elsewhere = float32_roundoffs()
    return on_cuda if device.type == "cuda" else elsewhere


def _blame_of_rounding(schedule: Schedule, work_dtype: torch.dtype, chain_dtype: torch.dtype) -> str:
    """Return the part of an error that blames torch's rounding of float32 factors; "" if that is not the reason."""
    is_safe = safe_restarts(schedule, work_dtype, unit_roundoff(chain_dtype)) is not None
    return ", because torch.set_float32_matmul_precision lets torch round float32 factors" if is_safe else ""
