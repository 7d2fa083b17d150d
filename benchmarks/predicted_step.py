"""The time on a GPU of a step counted on fake tensors, by the package's model of products. Nothing is timed.

Products take what `kernels.speeds.predictions` says, everything else as long as moving its bytes takes
(`pass_seconds`), and each kernel a gap after the one before it. Copies that torch makes of addends are such
passes, too; those of small matrices may be faster, as they lie in the cache. The host's time is not included, as in a
step whose launches are replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import torch

from benchmarks.fake_gpu import GPU, SYMMETRIC, Product, Work, counted_step, fake_gpu, fake_optimizer
from benchmarks.shapes import Parameter

# Bytes that an H200 copies in a second, the share of that which a simple pass reaches, and the seconds between
# two kernels of a graph. These are assumptions, like the rates of the products. An H100 copies less: the lab predicts
# with what it has measured.
COPIED, REACHED, GAP = 4.3e12, 0.8, 1e-6
# Of an element in float32: AdamW reads the gradient; it reads and writes the parameter and two averages.
ADAMW_BYTES = 28

# The numbers of sections that `hopper_gemm_` is tried with, and how many pairs of multiprocessors its squares are cut
# for: `kernels.gpu.tuned.COMPILED` and `kernels.gpu.hopper_gemm.PAIRS`.
SECTIONS, PAIRS = (1, 3, 5), 66

# Batch, m and k of X (batch, m, k).
Size = tuple[int, int, int]
# The seconds of X Xᵀ on a GPU: from the package's predictions, a `Gpu`, X's size, and the bytes copied in a second.
SymmetricSeconds = Callable[..., float]


def modelled_gpu(kernel: ModuleType, device: torch.device):
    """Return the `Gpu` of a device whose rates the package's model knows; None for any other device."""
    gpu = kernel.kernels.speeds.machine.gpu_of(device)
    known = gpu is not None and gpu.capability in kernel.kernels.speeds.predictions.RATES and not torch.version.hip
    return gpu if known else None


def by_triton(predictions: ModuleType, gpu, size: Size, copied: float = COPIED) -> float:
    """Return the seconds of the kernel that Triton compiles, by a model that knows no rate of copies."""
    return predictions.symmetric_seconds(gpu, *size)


def by_cutlass(predictions: ModuleType, gpu, size: Size, copied: float = COPIED) -> float:
    """Return the seconds of `hopper_gemm_` in the best of the numbers of SECTIONS, which `warmup` tries, too."""
    return min(in_sections(predictions, gpu, size, sections, copied) for sections in SECTIONS)


def in_sections(predictions: ModuleType, gpu, size: Size, sections: int, copied: float = COPIED) -> float:
    """Return the seconds of `hopper_gemm_` for X Xᵀ of X `size`, (batch, m, k), with one number of sections.

    Its tiles, two for each square, and its main loop are those of torch's fastest product. So it is assumed to reach
    the same rate. A section also writes and reads the sums of a square, at one pair's share of the memory's rate.
    """
    (batch, m, k), (rows, cols, part) = size, predictions.DENSE_TILES[0]
    pairs, side = gpu.multiprocessors // 2, -(-m // predictions.SQUARE)
    squares = side * (side + 1) // 2
    cut = squares % PAIRS if sections > 1 else 0
    product = 2 * rows * cols * k / (predictions.RATES[gpu.capability].sustained * part)
    sums = 2 * 4 * predictions.SQUARE**2 * pairs / copied
    # Pairs take turns at the whole squares of a matrix, then at its sections, then at the next matrix.
    of_matrix = [product] * (squares - cut) + [product / sections + sums] * (cut * sections)
    turns = [seconds + predictions.DENSE_TILE_SECONDS for seconds in of_matrix] * batch
    return max(sum(turns[pair::pairs]) for pair in range(pairs)) + predictions.DENSE_LAUNCH_SECONDS


def in_config(kernel: ModuleType, gpu, size: Size, config: tuple, copied: float = COPIED) -> float | None:
    """Return the seconds of X Xᵀ of X `size` launched in a configuration; None if they are not predicted."""
    predictions = kernel.kernels.speeds.predictions
    if config in kernel.kernels.gpu.tuned.COMPILED:
        return in_sections(predictions, gpu, size, config.sections, copied)
    known = predictions.predicted_gain(gpu, *size[1:]) is not None
    return by_triton(predictions, gpu, size) if known else None


# Whose symmetric products a step has, by the ways of `fake_gpu` whose products are counted. "torch" has none.
PREDICTED = {"torch": by_triton, "symmetric": by_triton, "compiled": by_cutlass}


def predicted_step(kernel: ModuleType, parameters: Sequence[Parameter], way: str, copied: float = COPIED) -> float:
    """Return the seconds of a step over a model whose products are launched in one of the ways PREDICTED."""
    with fake_gpu(kernel, way):
        work = counted_step(fake_optimizer(kernel, parameters))
    return predicted_seconds(kernel, work, PREDICTED[way], copied)


def predicted_seconds(
    kernel: ModuleType, work: Work, symmetric: SymmetricSeconds = by_triton, copied: float = COPIED, gpu: tuple = GPU
) -> float:
    """Return the seconds of counted kernels on a GPU, any of the model's, with any rate of copies."""
    predictions = kernel.kernels.speeds.predictions
    gpu = predictions.Gpu(*gpu)

    def seconds(product: Product) -> float:
        if product.operation == SYMMETRIC:
            m, _, k = product.size
            return symmetric(predictions, gpu, (product.batch, m, k), copied)
        return predictions.dense_seconds(gpu, product.batch, product.size)

    products = sum(count * seconds(product) for product, count in work.products.items())
    gaps = GAP * (sum(work.kernels.values()) - sum(work.products.values()))
    return products + pass_seconds(work.bytes - work.bytes_of_products, copied) + gaps


def pass_seconds(moved: float, copied: float = COPIED) -> float:
    """Return the seconds in which simple passes move bytes, those of a step as those of fused AdamW."""
    return moved / (REACHED * copied)


def goal_seconds(kernel: ModuleType, flop: float, elements: int) -> float:
    """Return the goal for a step: one pass of fused AdamW over all elements, and 1.2 times the time of `flop`."""
    sustained = GPU[1] * kernel.kernels.speeds.predictions.RATES[GPU[0]].sustained
    return pass_seconds(ADAMW_BYTES * elements) + 1.2 * flop / sustained
