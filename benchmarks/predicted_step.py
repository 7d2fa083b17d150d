"""The time on a GPU of a step counted on fake tensors, by the package's model of products. Nothing is timed.

Products take what `kernels.predictions` says, everything else as long as moving its bytes takes, and each kernel a gap
after the one before it. The host's time is not included, as in a step whose launches are replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from benchmarks.fake_gpu import GPU, Product, Work

# Bytes that an H200 copies in a second, the share of that which a simple pass reaches, and the seconds between
# two kernels of a graph. These are assumptions, like the rates of the products.
COPIED, REACHED, GAP = 4.3e12, 0.8, 1e-6

# The seconds of X Xᵀ of X (batch, m, k) on a GPU: from the package's predictions, a `Gpu`, batch, m and k.
SymmetricSeconds = Callable[..., float]


def by_triton(predictions: ModuleType, gpu, batch: int, m: int, k: int) -> float:
    """Return the seconds of the kernel that Triton compiles."""
    return predictions.symmetric_seconds(gpu, batch, m, k)


def by_cutlass(predictions: ModuleType, gpu, batch: int, m: int, k: int) -> float:
    """Return the seconds of `hopper_gemm_`, without sections.

    Its tiles, two for each square of 256, and its main loop are those of torch's fastest product. So it is assumed to
    reach the same rate.
    """
    rows, cols, part = predictions.DENSE_TILES[0]
    rate, side = predictions.RATES[gpu.capability].sustained, -(-m // cols)
    rounds = -(-batch * side * (side + 1) // 2 // (gpu.multiprocessors * rows // cols))
    tile = 2 * rows * cols * k / (rate * part) + predictions.DENSE_TILE_SECONDS
    return rounds * tile + predictions.DENSE_LAUNCH_SECONDS


def predicted_seconds(kernel: ModuleType, work: Work, symmetric: SymmetricSeconds = by_triton) -> float:
    """Return the seconds of a step's kernels on the GPU of `benchmarks.fake_gpu`."""
    predictions = kernel.kernels.predictions
    gpu = predictions.Gpu(*GPU)

    def seconds(product: Product) -> float:
        if product.operation == "symmetric_gemm_":
            m, _, k = product.size
            return symmetric(predictions, gpu, product.batch, m, k)
        return predictions.dense_seconds(gpu, product.batch, product.size)

    products = sum(count * seconds(product) for product, count in work.products.items())
    passes = (work.bytes - work.bytes_of_products) / (REACHED * COPIED)
    return products + passes + GAP * (sum(work.kernels.values()) - sum(work.products.values()))


def goal_seconds(kernel: ModuleType, flop: float, elements: int) -> float:
    """Return the goal for a step: fused AdamW over all elements, 28 bytes each, and 1.2 times the time of `flop`."""
    sustained = GPU[1] * kernel.kernels.predictions.RATES[GPU[0]].sustained
    return 28 * elements / COPIED + 1.2 * flop / sustained
