"""The tables of products of each device, and which of them is taken for matrices of a size."""

from __future__ import annotations

import functools
from typing import Iterator, Optional

import torch

from . import native_products
from .affine_products import add_to_diagonal_, batched_affine, one_by_one_affine, single_affine
from .circumstances import ALONE, Circumstances
from .gpu.triton_errors import in_a_line, is_of_triton
from .gpu.tuned import launches_hopper_gemm
from .product_table import Products
from .speeds.gains import Gain, failed_here, gain_of, measured_sizes, predicted
from .speeds.machine import gpu_of, supports_triton
from .speeds.measurements import Ranks
from .tracing import constant_while_traced

try:
    from .gpu import small_polar, symmetric_gemm
    from .gpu.launch_cache import launch_fault, symmetric_product
except Exception as error:  # torch for CPUs comes without Triton, and a broken one may raise anything
    if not is_of_triton(error):
        raise
    small_polar = symmetric_gemm = symmetric_product = None
    launch_fault = functools.partial(str, in_a_line(error))

# With AVX512_BF16 an AMD core multiplies bfloat16 about twice as fast as float32. In five steps of an m x n matrix, in
# units of m² FLOP, the standard iteration takes 15 n + 5 m in bfloat16; the Gram iteration takes 6 n in bfloat16 and 14
# m in float32. If float32 costs exactly twice as much, it is faster from n = 23/9 m = 2.56 m on. On one core of an AMD
# EPYC (Zen 4) it was faster from about 2.75 m + 64 on, for m from 8 to 768. There m counts as `gemm_` pads it.
_GRAM_RATIO, _GRAM_COLUMNS, _BLOCK = 2.75, 64, 32


SINGLE = Products(
    gram=lambda X, out=None: torch.mm(X, X.mT, out=out),
    gram_affine=lambda A, b, c, a, out=None: add_to_diagonal_(torch.addmm(A, A, A, beta=b, alpha=c, out=out), a),
    commuting=lambda A, B, out=None: torch.mm(A, B, out=out),
    conjugated=lambda A, B: torch.mm(torch.mm(B, A), A),
    affine=single_affine,
    name="torch.mm",
    batched=False,
)
NATIVE = Products(
    gram=lambda X, out=None: native_products.symmetric(X, X.mT, out=out),
    gram_affine=lambda A, b, c, a, out=None: add_to_diagonal_(native_products.symmetric(A, A, A, c, b, out), a),
    commuting=lambda A, B, out=None: native_products.symmetric(A, B, out=out),
    conjugated=lambda A, B: native_products.symmetric(A, native_products.symmetric(B, A)),
    affine=native_products.affine,
    name="gemm_",
    newton_schulz=native_products.newton_schulz,
    in_place=True,
    gram_gain=2.0,  # it computes half of a symmetric product, at torch's rate
    square_gain=2.0,
)


def with_torchs_affine(products: Products) -> Products:
    """Return a table whose product that is not symmetric is torch's, which takes every dtype."""
    if products.affine is not NATIVE.affine:
        return products
    name, whole = f"{products.name} + torch.mm", {"newton_schulz": None, "gram_newton_schulz": None}
    return products._replace(affine=one_by_one_affine, name=name, in_place=False, **whole)


BATCHED = Products(
    gram=lambda X, out=None: torch.bmm(X, X.mT, out=out),
    gram_affine=lambda A, b, c, a, out=None: add_to_diagonal_(torch.baddbmm(A, A, A, beta=b, alpha=c, out=out), a),
    commuting=lambda A, B, out=None: torch.bmm(A, B, out=out),
    conjugated=lambda A, B: torch.bmm(torch.bmm(B, A), A),
    affine=batched_affine,
    name="torch.bmm",
    a_on_diagonal=True,
)


@functools.cache
def symmetric_table(among: Optional[Ranks]) -> Products:
    """Return the table of the symmetric kernel, launched as the ranks `among` have agreed."""
    product = lambda *operands, **options: symmetric_product(*operands, among=among, **options)  # noqa: E731
    return BATCHED._replace(
        gram=lambda X, out=None: product(X, X.mT, out=out),
        gram_affine=lambda A, b, c, a, out=None: product(A, A, A, c, b, out, a),
        commuting=lambda A, B, out=None: product(A, B, out=out),
        conjugated=lambda A, B: product(A, product(B, A)),
        name="symmetric_gemm",
    )


SYMMETRIC = symmetric_table(None)


def _native_tables(dtype: torch.dtype, instructions: str) -> dict[str, Products]:
    """Return by name torch's table, and those of `gemm_` with these instructions."""
    native = NATIVE._replace(name=f"gemm_ ({instructions})")
    whole = native_products.gram_newton_schulz
    if dtype == torch.float32:
        native = native._replace(gram_newton_schulz=whole)
        return {"SINGLE": SINGLE, "NATIVE": native, "NATIVE_SYMMETRIC": with_torchs_affine(native)}
    # Float32 squares are multiplied at half of bfloat16's rate.
    gram = native._replace(newton_schulz=None, gram_newton_schulz=whole, float32_squares=True, square_gain=1.0)
    return {"SINGLE": SINGLE, "NATIVE": native, "NATIVE_SYMMETRIC": with_torchs_affine(native), "NATIVE_GRAM": gram}


_CPU_TABLES = {dtype: _native_tables(dtype, name) for dtype, name in native_products.INSTRUCTIONS.items()}


def cpu_tables(dtype: torch.dtype) -> dict[str, Products]:
    """Return by name the tables that compete on a CPU for matrices of this dtype: `SINGLE`, and those of `gemm_`.

    With each of them a matrix gets the same bits alone and in any batch.
    """
    return _CPU_TABLES.get(dtype, {"SINGLE": SINGLE})


def select_products(
    device: torch.device,
    dtype: torch.dtype,
    m: int,
    n: int,
    circumstances: Circumstances = ALONE,
    method: str = "auto",
) -> Products:
    """Return the table for wide m x n matrices of a method; with `auto` it may be one for float32 squares.

    On a CPU the table is the one that was measured to be fastest (`cpu_tables`), unless `circumstances` name one.
    Without a measurement, float32 and bfloat16 use the compiled product if it was faster on other processors like this
    one. torch's batched products split the sum over k differently for different batch sizes, so a matrix would get
    other bits in a batch than alone; multiplying one at a time avoids that. On a GPU each symmetric product uses the
    symmetric kernel if that was measured, or is predicted, to be faster; `name` and `source` say which kernels were
    chosen, and how. If autograd or torch.func goes through the matrices (`circumstances.transformed`), only torch's
    products are used.
    """
    if device.type == "cpu":
        return SINGLE if circumstances.transformed else _cpu_products(device, dtype, (m, n), circumstances, method)
    if circumstances.transformed:
        return BATCHED
    among = circumstances.among
    gram, square = (symmetric_choice(device, dtype, m, k, among) for k in (n, m))
    chosen = zip((gram, square), (n, m))
    long, short = (_symmetric(device, dtype, m, k, among) if (known.gain or 0) >= 1 else BATCHED for known, k in chosen)
    name = " + ".join(dict.fromkeys(table.name for table in (long, short, BATCHED)))
    gains = tuple(max(known.gain or 0, 1.0) for known in (gram, square))
    source = " and ".join(dict.fromkeys(known.source or "by default" for known in (gram, square)))
    table = short._replace(gram=long.gram, name=name, square_name=short.name)
    return table._replace(gram_gain=gains[0], square_gain=gains[1], source=source)


def _symmetric(device: torch.device, dtype: torch.dtype, m: int, k: int, among: Optional[Ranks]) -> Products:
    """Return `symmetric_table`, named after the kernel that it launches for (m, k)."""
    table = SYMMETRIC if among is None else symmetric_table(among)  # torch.compile warns of cached functions
    return table._replace(name="hopper_gemm") if launches_hopper_gemm(device, dtype, m, k, among) else table


def _cpu_products(
    device: torch.device, dtype: torch.dtype, size: tuple[int, int], circumstances: Circumstances, method: str
) -> Products:
    """Return the table that was measured for exactly this size, or else the first default that has not failed."""
    tables, failures = cpu_tables(dtype), failed_here(device, dtype, "cpu_products")
    if circumstances.table is not None or len(tables) == 1:
        return tables[circumstances.table or "SINGLE"]
    able = [name for name, table in tables.items() if method == "auto" or not table.float32_squares]
    if method == "gram_float32" and native_products.is_faster(dtype):
        able = [name for name in tables if name not in able and name not in failures] or able
    here, _ = measured_sizes(device, dtype, "cpu_products", circumstances.among)
    for *measured, known in here:
        if tuple(measured) == size and known.entry["products"] in able:  # a loop, as in `nearest_of`
            return tables[known.entry["products"]]._replace(source=known.source)
    defaults = (name for name in (*_cpu_defaults(dtype, *size), "SINGLE", *able) if name in able)
    name = next((name for name in defaults if name not in failures), None)
    # A file may say that all have failed.
    return tables[name]._replace(source="by default") if name else SINGLE._replace(source="as all have failed here")


def _cpu_defaults(dtype: torch.dtype, m: int, n: int) -> Iterator[str]:
    """Yield the tables that are taken without a measurement: the first that has not failed."""
    instructions = native_products.INSTRUCTIONS.get(dtype)
    if instructions == "avx512_bf16" and n >= _GRAM_RATIO * -(-m // _BLOCK) * _BLOCK + _GRAM_COLUMNS:
        yield "NATIVE_GRAM"
    if native_products.is_faster(dtype):
        yield "NATIVE_SYMMETRIC" if instructions == "amx" and _is_long_or_large(m, n) else "NATIVE"


def _is_long_or_large(m: int, n: int) -> bool:
    """Whether most work is the product that is not symmetric, and torch's is faster.

    By `sweep_orthogonalize.py` on two cores with AMX.
    """
    return not native_products.fits_a_core(m, n, torch.bfloat16.itemsize) and (m >= 1536 or n >= 3 * m)


def symmetric_choice(device: torch.device, dtype: torch.dtype, m: int, k: int, among: Optional[Ranks] = None) -> Gain:
    """Return torch's time divided by the symmetric kernel's for (m, k), and how it is known.

    A measurement made here comes first, then the nearest shipped one, then the prediction. The gain is None if there is
    none of these; sizes that are not multiples of 16 are neither measured nor predicted.
    """
    fault = triton_fault(device)
    if fault:
        return Gain(None, f"by default, as Triton cannot launch here ({fault})")
    if not has_triton(device) or m % 16 or k % 16:
        return Gain()
    known = gain_of(device, dtype, "symmetric_gemm", (m, k), among)
    return predicted(device, dtype, m, k) if known.gain is None else known


def launches_triton(device: torch.device) -> bool:
    """Whether Triton's kernels may run on a GPU. Of CPUs and absent GPUs it says only whether there is Triton."""
    return has_triton(device) and not triton_fault(device)


def has_triton(device: torch.device) -> bool:
    """Whether Triton can be imported, and supports the device if that is a GPU which is here."""
    return symmetric_product is not None and supports_triton(device)


@constant_while_traced
def triton_fault(device: torch.device) -> str:
    """Return why Triton's kernels cannot run on a real GPU that they support: an error in one line; "" if they can."""
    return launch_fault() if supports_triton(device) and gpu_of(device) else ""


def small_choice(device: torch.device, dtype: torch.dtype, m: int, n: int, among: Optional[Ranks] = None) -> Gain:
    """Return the gain of `small_polar` for m x n: the time of separate products divided by that of the one kernel.

    The gain is None if nothing was measured, or if the kernel does not take matrices of this size.
    """
    if not launches_triton(device) or not small_polar.fits(m, n, dtype):
        return Gain()
    return gain_of(device, dtype, "small_polar", (m, n), among)
