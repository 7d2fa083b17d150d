"""The candidates for a size, each with a proof and with the work that is timed, which is what a step does."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Optional

import torch
from torch import Tensor

from ..iteration import CPU_WORK_DTYPE, Iteration, choose_iteration
from ..kernels.circumstances import Circumstances
from ..kernels.formats import dtype_name
from ..kernels.native_products import fits_a_core
from ..kernels.newton_schulz import gram_matrix, gram_newton_schulz, newton_schulz
from ..kernels.operands import TRITON_DTYPES
from ..kernels.products import NATIVE, SINGLE, Products, cpu_tables, launches_triton, select_products, small_polar
from ..kernels.speeds.measurement_file import Need
from ..polar.factors import polar_factors
from ..polar.packing import matrices_together
from ..schedules import resolve_schedule
from .proof import Compute, adversarial, operands_of, prove_gram, prove_products
from .race import Timed
from .step_proof import prove_apply, prove_iteration

EPS = 1e-7


class Task(NamedTuple):
    """A need on a device, and the largest number of its matrices that a step works on at once."""

    need: Need
    device: torch.device
    count: int


class Candidate(NamedTuple):
    """One way to multiply: `prove` raises if it is wrong, `run` does the timed work once, on `count` matrices."""

    prove: Callable[[], None]
    run: Callable[[], object]
    label: str  # its name in messages
    count: int = 1


class Contest(NamedTuple):
    """The candidates of a task. `before` is the one that is chosen without a measurement, `rival` is torch's."""

    candidates: Mapping[str, Candidate]
    before: str
    rival: str
    entry: Callable[[str, Mapping[str, Timed]], dict[str, Any]]  # makes the winner's entry from all times


def prove_nothing() -> None:
    """Prove nothing: torch's products are not tested, and an earlier choice was proven with the same kernels."""


def tasks_of(device: torch.device, dtype: torch.dtype, size: tuple[int, int], count: int) -> list[Task]:
    """Return what can be measured for `count` wide m x n matrices of a work dtype: nothing if there is no choice."""
    name = dtype_name(dtype)
    if device.type == "cpu":
        return [Task(Need("cpu_products", name, *size), device, count)] if len(cpu_tables(dtype)) > 1 else []
    if device.type != "cuda" or not launches_triton(device) or dtype not in TRITON_DTYPES:
        return []
    m, n = size
    needs = [Need("symmetric_gemm", name, m, n), Need("symmetric_gemm", name, m, m)] if m % 16 + n % 16 == 0 else []
    needs += [Need("small_polar", name, m, n)] if small_polar.fits(m, n, dtype) else []
    return [Task(need, device, count) for need in dict.fromkeys(needs)]


def cpu_contest(task: Task) -> Contest:
    """Return the contest of the CPU's tables of products. Each is timed on whole iterations."""
    device, dtype = task.device, getattr(torch, task.need.dtype)
    size = task.need.size
    tables = cpu_tables(dtype)
    iterations = {name: _iteration(device, dtype, size, name) for name in tables}
    tables = {name: table for name, table in tables.items() if iterations[name] is not None}
    defaults = (select_products(device, dtype, *size, method=method) for method in ("auto", "standard"))
    names = {table: name for name, table in tables.items()}
    before = next(names[table] for table in (each._replace(source="") for each in defaults) if table in names)
    together = matrices_together(device, size, iterations[before])
    G = drawn(device, max(1, min(task.count, together)), *size).to(dtype)

    like = G.new_empty(0)
    # What several tables have in common is proven once.
    proofs = tuple(lru_cache(maxsize=None)(proof) for proof in (_prove_squares, prove_apply))

    def candidate(name: str) -> Candidate:
        table, iteration = tables[name], iterations[name]
        run = partial(polar_factors, G, iteration, EPS)
        label = f"{iteration.method} {table.name}" if table.float32_squares else table.name
        return Candidate(partial(_prove_table, iteration, proofs, like, size), run, label)

    def entry(winner: str, times: Mapping[str, Timed]) -> dict[str, Any]:
        seconds = {name: time.seconds for name, time in times.items()}
        return {"m": size[0], "k": size[1], "products": winner, "count": len(G), "seconds": seconds}

    return Contest({name: candidate(name) for name in tables}, before, "SINGLE", entry)


def drawn(device: torch.device, *shape: int) -> Tensor:
    """Return normal entries in float32, without touching torch's default generators."""
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(0), dtype=torch.float32, device=device)


def _iteration(device: torch.device, dtype: torch.dtype, size: tuple[int, int], name: str) -> Optional[Iteration]:
    """Return the iteration that a step would run with the table of a name. float32 counts as the default if it is.

    None if no step would, because torch multiplies float32 here with fewer digits than the table's method needs.
    """
    method = "gram_float32" if cpu_tables(dtype)[name].float32_squares else "auto"
    circumstances = Circumstances(default_dtype=dtype == CPU_WORK_DTYPE, table=name)
    try:
        return choose_iteration(device, dtype, size, resolve_schedule("polar_express", 5), method, circumstances)
    except ValueError:  # the method is not safe
        return None


def _prove_table(
    iteration: Iteration, proofs: tuple[Callable[..., None], ...], like: Tensor, size: tuple[int, int]
) -> None:
    """Raise WrongResultError if a table's symmetric or compiled products are wrong. torch's products are not tested."""
    table, chain_dtype, (prove_squares, prove_affine) = iteration.products, iteration.chain_dtype, proofs
    if table.gram is SINGLE.gram:
        return
    if chain_dtype != like.dtype:
        prove_gram(lambda A, *_: gram_matrix(A, table, chain_dtype), adversarial(like, *size))
    chain, of_squares = like.to(chain_dtype), size if chain_dtype == like.dtype else (size[0], size[0])
    prove_squares(chain, of_squares, table.batched, table.gram, table.gram_affine, table.commuting)
    if table.affine is NATIVE.affine:
        prove_affine(table.affine, like, size)
    # Threads share large matrices, which a step takes one by one. Of others each thread gets a whole one.
    count = torch.get_num_threads() + 1 if fits_a_core(*size, chain_dtype.itemsize) else 1
    one_by_one = table._replace(newton_schulz=None, gram_newton_schulz=None)
    for iterate in _in_one_call(table, chain_dtype):
        prove_iteration(partial(iterate, products=table), partial(iterate, products=one_by_one), like, (count, *size))


def _in_one_call(table: Products, chain_dtype: torch.dtype) -> Iterator[Callable[..., Tensor]]:
    """Yield each iteration that a table makes in one call, with the fewest steps that show every kind of step."""
    if table.newton_schulz is not None:  # the second step takes what the first has made
        yield partial(newton_schulz, schedule=resolve_schedule("polar_express", 2))
    if table.gram_newton_schulz is not None:  # a window of one step, and one with a step that is neither first nor last
        steps = resolve_schedule("polar_express", 4)
        yield partial(gram_newton_schulz, windows=(steps[:1], steps[1:]), chain_dtype=chain_dtype)


def _prove_squares(like: Tensor, size: tuple[int, int], batched: bool, *products: Callable[..., Tensor]) -> None:
    """Raise WrongResultError unless a table's `gram`, `gram_affine` and `commuting` are right."""
    compute = partial(_symmetric_product, *products)
    prove_products(compute if batched else partial(_one_by_one, compute), operands_of(like, size))


def _symmetric_product(
    gram: Callable[..., Tensor],
    gram_affine: Callable[..., Tensor],
    commuting: Callable[..., Tensor],
    *operands: Any,
) -> Tensor:
    A, B, D, scalars = operands
    if D is not None:
        alpha, beta, diagonal = scalars
        return gram_affine(A, beta, alpha, diagonal)
    return gram(A) if B.data_ptr() == A.data_ptr() else commuting(A, B)


def _one_by_one(compute: Compute, A: Tensor, B: Tensor, D: Optional[Tensor], scalars: tuple) -> Tensor:
    addends = [None] * len(A) if D is None else D
    return torch.stack([compute(*operands, scalars) for operands in zip(A, B, addends)])
