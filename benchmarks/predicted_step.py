"""What a step that was counted on fake tensors takes on a GPU, by the package's model of products. Nothing is timed.

Products take what `kernels.predictions` says, everything else as long as its bytes do, and each kernel a gap to the one
before it. The host is not in it: that is the time of the kernels, as of a step whose launches are replayed.
"""

from __future__ import annotations

from types import ModuleType

from benchmarks.fake_gpu import GPU, Product, Work

# Bytes that an H200 copies in a second, how much of that a pass reaches that does little else, and the seconds between
# two kernels of a graph. Assumptions, as the rates of the products are.
COPIED, REACHED, GAP = 4.3e12, 0.8, 1e-6


def predicted_seconds(kernel: ModuleType, work: Work) -> float:
    """Return the seconds of a step's kernels on the GPU of `benchmarks.fake_gpu`."""
    predictions = kernel.kernels.predictions
    gpu = predictions.Gpu(*GPU)

    def seconds(product: Product) -> float:
        if product.operation == "symmetric_gemm_":
            m, _, k = product.size
            return predictions.symmetric_seconds(gpu, product.batch, m, k)
        return predictions.dense_seconds(gpu, product.batch, product.size)

    products = sum(count * seconds(product) for product, count in work.products.items())
    passes = (work.bytes - work.bytes_of_products) / (REACHED * COPIED)
    return products + passes + GAP * (sum(work.kernels.values()) - sum(work.products.values()))


def goal_seconds(kernel: ModuleType, flop: float, elements: int) -> float:
    """Return what a step is to take: fused AdamW over all elements, 28 bytes each, and 1.2 times the `flop`."""
    sustained = GPU[1] * kernel.kernels.predictions.RATES[GPU[0]].sustained
    return 28 * elements / COPIED + 1.2 * flop / sustained
