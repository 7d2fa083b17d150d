"""Prove the symmetric kernel on this GPU against float64, and time it against torch's product.

    python -m benchmarks.sweep_symmetric_gemm [--build DIR] [--minutes N] [--output FILE] [--tiny]

The product X Xᵀ of X (b, m, k) is 2 b m² k FLOP for torch and half of that for the kernel, so the gain is at most 2.
Proof comes first, on random operands, on matrices with one dominant row and of rank one, and with a poisoned result:
the error is at most twice torch's, the result is bit for bit symmetric, and a matrix gets the same bits alone and in
the batch. A product that fails is named, is not timed, and makes the exit status 1. Beside each time is the one that
the model predicts for the kernel that is launched, Triton's or, where tuning has chosen it, `hopper_gemm_`
(`benchmarks.predicted_step`). Timed calls rotate through copies of the operand and are replayed as a graph, so that
starting them takes no time. The copies are together larger than the L2 cache, except for squares of up to 512 rows,
whose 64 copies fit into it and may be read faster than from memory. Without a GPU, `--tiny` runs everything on the CPU
version of the kernel, which proves nothing.

Results are written row by row, and a second run with the same `--output` continues the first one.
The row of a case that raises has the error, and a later run tries it last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.predicted_step import in_config, modelled_gpu
from benchmarks.result_file import ResultFile, facts, has_error
from benchmarks.sweep_options import load, measure_cases, path_of, plain_parser
from benchmarks.terminal import print_results
from benchmarks.timing import Deadline, replayed, rotated, take_turns
from tests.support.symmetric_products import WrongResultError, check_product

SHAPES = [(1, m, m) for m in (128, 256, 512)]
SHAPES += [(b, m, m) for m in (1024, 2048, 3072, 4096, 5120, 8192) for b in (1, 7, 16)]
SHAPES += [(1, 2048, 8192), (1, 4096, 16384), (1, 768, 3072), (48, 768, 768), (64, 512, 1280), (16, 1024, 4096)]
TINY_SHAPES = [(1, 32, 48), (3, 33, 20)]
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class Result:
    """One shape. Seconds are medians, spreads half the interquartile range over the median; no problems if right."""

    dtype: str
    shape: tuple[int, int, int]
    problems: list[str]
    seconds: float | None = None
    spread: float | None = None
    torch_seconds: float | None = None
    torch_spread: float | None = None
    predicted_seconds: float | None = None
    predicted_torch_seconds: float | None = None

    @property
    def gain(self) -> float | None:
        """torch's time divided by the kernel's."""
        return self.seconds and self.torch_seconds / self.seconds

    @property
    def tera_flops(self) -> float | None:
        """The kernel's rate if all of the full product's FLOP are counted, in 1e12 a second."""
        return dense_tera_flops(self.shape, self.seconds)


def dense_tera_flops(shape: tuple[int, int, int], seconds: float | None) -> float | None:
    """Return the rate of X Xᵀ, X (b, m, k), if all of the full product's FLOP are counted, in 1e12 a second."""
    b, m, k = shape
    return seconds and 2 * b * m * m * k / seconds / 1e12


def prove(symmetric_gemm: Callable, X: Tensor) -> list[str]:
    """Return the problems of the kernel's X Xᵀ."""
    ours, problems = X.new_full((len(X), X.size(1), X.size(1)), float("nan")), []
    symmetric_gemm(X, X.mT, out=ours)
    try:
        check_product(ours, X, X.mT)
    except WrongResultError as error:
        problems.append(str(error))
    if not torch.equal(symmetric_gemm(X[-1:], X[-1:].mT), ours[-1:]):
        problems.append("other bits alone")
    return problems


def measure(kernel: ModuleType, shape: tuple[int, int, int], dtype: str, device: torch.device) -> Result:
    generator, symmetric_gemm = torch.Generator(device).manual_seed(0), kernel.kernels.gpu.symmetric_gemm.symmetric_gemm
    X = torch.randn(shape, generator=generator, dtype=DTYPES[dtype], device=device)
    others = kernel.tuning.proof.adversarial(X, *shape[1:])
    problems = prove(symmetric_gemm, X) + [f"{text} (adversarial)" for text in prove(symmetric_gemm, others)]
    result = Result(dtype, shape, problems, **predicted(kernel, X))
    if result.problems:
        return result
    (result.seconds, result.spread), (result.torch_seconds, result.torch_spread) = compare(symmetric_gemm, X)
    return result


def predicted(kernel: ModuleType, X: Tensor) -> dict[str, float]:
    """Return the seconds that the model predicts for the kernel that is launched for X Xᵀ, and for torch's product.

    Nothing where it predicts none.
    """
    (b, m, k), gpu = X.shape, modelled_gpu(kernel, X.device)
    if gpu is None:
        return {}
    config = kernel.kernels.gpu.symmetric_gemm.chosen_for(X, X.mT, None, X.new_empty(b, m, m))
    ours = in_config(kernel, gpu, (b, m, k), config)
    torchs = kernel.kernels.speeds.predictions.dense_seconds(gpu, b, (m, m, k))
    return {} if ours is None else {"predicted_seconds": ours, "predicted_torch_seconds": torchs}


def compare(symmetric_gemm: Callable, X: Tensor) -> list[tuple[float, float]]:
    """Return the seconds of a product and their relative spread, for the kernel and for torch."""
    copies, out = rotated(X), X.new_empty(len(X), X.size(1), X.size(1))
    ours = replayed([partial(symmetric_gemm, x, x.mT, out=out) for x in copies], X.device)
    torchs = replayed([partial(torch.bmm, x, x.mT, out=out) for x in copies], X.device)
    times = take_turns([ours, torchs], X.device, rounds=30 if X.is_cuda else 3)
    return [(seconds / len(copies), spread) for seconds, spread in times]


def key_of(dtype: str, shape: tuple[int, int, int]) -> str:
    return f"{dtype} {'x'.join(map(str, shape))}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = plain_parser("Prove and time the symmetric kernel.").parse_args(arguments)
    kernel, device = load(options)
    if device.type == "cpu" and not options.tiny:
        print("there is no GPU to measure on; --tiny walks through it on the kernel's stand-in")
        return 0
    cases = {key_of(*case): case for case in product(DTYPES, TINY_SHAPES if options.tiny else SHAPES)}
    results = ResultFile(path_of("symmetric-gemm", device, options), facts(kernel, device, {}), list(cases))

    def measured(key: str) -> Iterator[tuple[str, dict]]:
        dtype, shape = cases[key]
        r = measure(kernel, shape, dtype, device)
        yield key, {**asdict(r), "gain": r.gain, "tera_flops": r.tera_flops}

    measure_cases(results, {(key,): partial(measured, key) for key in cases}, Deadline(options.minutes))
    rows = list(results.rows.values())
    print_results(rows)
    return int(any(has_error(row) or row.get("problems") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
