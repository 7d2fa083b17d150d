"""The candidates on a GPU: launch configurations of our kernels, and torch's products."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence, Union

import torch
from torch import Tensor

from ..iteration import Iteration, choose_iteration
from ..kernels.formats import unnormalized_dtype
from ..kernels.gpu.hopper_gemm import cuts
from ..kernels.gpu.small_steps import steps_of
from ..kernels.gpu.tuned import COMPILED, Config, SmallConfig
from ..kernels.products import BATCHED, small_choice, small_polar, symmetric_choice, symmetric_gemm
from ..kernels.speeds.gains import Gain
from ..kernels.speeds.measurements import candidate_name
from ..polar.chains import chain_key
from ..polar.factors import polar_factors
from ..polar.packing import even_pieces, matrices_together, packed_together
from ..schedules import resolve_schedule
from .candidates import product_configs, small_configs
from .contest import EPS, Candidate, Contest, Task, drawn, prove_nothing
from .proof import DIAGONAL, PLAIN, SCALED, Operands, operands_of, prove_launch
from .race import Timed
from .small_proof import prove_small

TORCH = "torch"
# The largest gain that is recorded where torch's product wins: our kernel is chosen from a gain of 1 on.
_BELOW_ONE = 0.999
# No tile size divides these, so tiles at the edges are cut. They are multiples of 16, as all measured sizes are.
RAGGED = (272, 208)

AnyConfig = Union[Config, SmallConfig]


class _Ways(NamedTuple):
    """What a contest is made of: configurations, how each is proven and timed, and how torch does the same work."""

    configs: Sequence[AnyConfig]
    prove: Callable[[Any], None]
    run: Callable[[Any], object]
    torchs: Callable[[], object]
    chosen: Gain
    counts: Mapping[str, int]  # the matrices of one call, by the candidate's name


def gpu_contest(
    task: Task, configs: Optional[Sequence[AnyConfig]] = None, ragged: Optional[tuple[int, int]] = None
) -> Contest:
    """Return the contest of a task on a GPU among `configs`, of which the first is launched today; None: the package's.

    A product is also proven in the size `ragged`, where tiles are cut; None means RAGGED.
    """
    if task.need.kernel == "small_polar":
        ways = _small_ways(task, configs)
    else:
        ways = _product_ways(task, configs, ragged or RAGGED)
    made = {TORCH: Candidate(prove_nothing, ways.torchs, "torch's products", ways.counts[TORCH])}
    for config in ways.configs:
        name = _name(config)
        run, label = partial(ways.run, config), f"{_kernel(config)} {name}"
        made[name] = Candidate(partial(ways.prove, config), run, label, ways.counts[name])
    before = _name(ways.configs[0]) if (ways.chosen.gain or 0) >= 1 else TORCH
    return Contest(made, before, TORCH, partial(_entry, task, ways))


def _name(config: AnyConfig) -> str:
    """Return the name by which an entry's candidate is known, also as one that has failed."""
    return candidate_name(config._asdict(), "small_polar" if isinstance(config, SmallConfig) else "symmetric_gemm")


def _entry(task: Task, ways: _Ways, winner: str, times: Mapping[str, Timed]) -> dict[str, Any]:
    """Return the entry: our fastest configuration, and torch's time divided by its time."""
    named = {_name(config): config for config in ways.configs}
    names = [name for name in times if name != TORCH]
    best = winner if winner != TORCH else min(names, key=lambda name: times[name].seconds, default=None)
    if best is None:  # all of ours failed
        first, count = ways.configs[0], ways.counts[_name(ways.configs[0])]
        return {"m": task.need.m, "k": task.need.k, **first._asdict(), "gain": 0.0, "count": count}
    gain = times[TORCH].seconds / times[best].seconds if TORCH in times else 1.0
    return {
        "m": task.need.m,
        "k": task.need.k,
        **named[best]._asdict(),
        "gain": min(gain, _BELOW_ONE) if winner == TORCH else max(gain, 1.0),
        "seconds": times[best].seconds * ways.counts[best],
        "spread": times[best].spread,
        "count": ways.counts[best],
    }


def _product_ways(task: Task, configs: Optional[Sequence[AnyConfig]], ragged: tuple[int, int]) -> _Ways:
    """Return the ways to compute what an iteration multiplies: X Xᵀ of long matrices; b A + c A² and A B of squares."""
    device, dtype, (m, k) = task.device, getattr(torch, task.need.dtype), task.need.size
    configs = product_configs(device, dtype, (m, k)) if configs is None else configs
    if not cuts(m):  # sections are one launch then
        configs = list(dict.fromkeys(config._replace(sections=1) for config in configs))
    long = k != m
    counts = {TORCH: _count(task, BATCHED.name)}
    counts.update((_name(config), _count(task, _kernel(config))) for config in configs)
    X = drawn(device, max(counts.values()), m, k).to(dtype) / k**0.5
    results = [X.new_empty(len(X), m, m) for _ in range(1 if long else 2)]
    launch = symmetric_gemm.launch_symmetric_gemm
    alpha, beta = SCALED

    def run(config: Config) -> None:
        Y, *outs = (each[: counts[_name(config)]] for each in (X, *results))
        with _current(device):
            if long:
                return launch(Y, Y.mT, None, outs[0], PLAIN, config)
            launch(Y, Y, Y, outs[0], (alpha, beta, DIAGONAL), config)
            launch(Y, outs[0], None, outs[1], PLAIN, config)

    def torchs() -> None:
        Y = X[: counts[TORCH]]
        if long:
            BATCHED.gram(Y)
        else:
            BATCHED.commuting(Y, BATCHED.gram_affine(Y, beta, alpha, DIAGONAL))

    # All candidates are proven with the same matrices, which takes less time than drawing new ones.
    draw = lru_cache(maxsize=None)(partial(operands_of, X.new_empty(0)))
    prove = partial(_prove_product, draw, (ragged, (m, k)))
    return _Ways(configs, prove, run, torchs, symmetric_choice(device, dtype, m, k), counts)


def _prove_product(
    draw: Callable[[tuple[int, int]], Operands], sizes: Sequence[tuple[int, int]], config: Config
) -> None:
    """Raise WrongResultError unless a configuration is right for what `draw` returns for each of these sizes."""
    launch = symmetric_gemm.launch_symmetric_gemm

    def compute(A: Tensor, B: Tensor, D: Optional[Tensor], scalars: tuple) -> Tensor:
        C = A.new_full((len(A), A.size(1), A.size(1)), torch.nan)
        with _current(A.device):
            launch(A, B, D, C, scalars, config)
        return C

    for size in sizes:
        prove_launch(compute, draw(size))


def _small_ways(task: Task, configs: Optional[Sequence[AnyConfig]]) -> _Ways:
    """Return the ways to orthogonalize small matrices: all in one launch, or by separate products."""
    device, dtype, size = task.device, getattr(torch, task.need.dtype), task.need.size
    iteration = _iteration(device, dtype, size)._replace(in_one_launch=False)
    G = drawn(device, task.count, *size).to(unnormalized_dtype(dtype))  # as a step packs them
    C, scaling = torch.empty_like(G, dtype=dtype), (iteration.scale, EPS, dtype)
    steps, lengths = steps_of(iteration.gram_windows), tuple(map(len, iteration.gram_windows))
    launch = small_polar.launch_small_polar

    def run(config: SmallConfig) -> None:
        with _current(device):
            launch(G, C, steps, scaling, config)

    def prove(config: SmallConfig) -> None:
        def start(*operands: Any) -> None:
            with _current(device):
                launch(*operands, config)

        prove_small(start, G.new_empty(0, dtype=dtype), size, config.side, lengths)

    configs = small_configs(device, dtype, size) if configs is None else configs
    torchs = partial(polar_factors, G, iteration, EPS)
    counts = dict.fromkeys((TORCH, *map(_name, configs)), len(G))
    return _Ways(configs, prove, run, torchs, small_choice(device, dtype, *size), counts)


def _count(task: Task, name: str) -> int:
    """Return how many matrices a step gives to a product of this name at once.

    Squares come in as many as fill the GPU with the tiles of their product. X Xᵀ of long matrices has as many as the
    squares that are launched today, or, in a chain, whatever is packed together.
    """
    device, dtype, (m, k) = task.device, getattr(torch, task.need.dtype), task.need.size
    iteration = _iteration(device, dtype, (m, max(m, k)))
    if k == m:
        iteration = iteration._replace(products=iteration.products._replace(square_name=name))
    if k != m and chain_key(device, iteration) is not None:
        most = packed_together((m, k), torch.float32.itemsize)
    else:
        most = matrices_together(device, (m, m), iteration)
    return max(end - start for start, end in even_pieces(max(1, task.count), most))


def _kernel(config: AnyConfig) -> str:
    if isinstance(config, SmallConfig):
        return "small_polar"
    return "hopper_gemm" if config in COMPILED else "symmetric_gemm"


def _iteration(device: torch.device, dtype: torch.dtype, size: tuple[int, int]) -> Iteration:
    return choose_iteration(device, dtype, size, resolve_schedule("polar_express", 5))


def _current(device: torch.device):
    """Make `device` the current one: Triton launches there, not on the device of the arguments."""
    return torch.cuda.device(device if device.type == "cuda" else -1)
