"""The time of products and of whole orthogonalizations on a GPU, counted on fake tensors and predicted like a step's.

`benchmarks.predicted_step` has the model and says what it leaves out: the host's time, above all.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.fake_gpu import SYMMETRIC, Unguarded, Work
from benchmarks.predicted_step import Size, by_cutlass, by_triton, modelled_gpu, predicted_seconds

EPS = 1e-7


def predicted_factors(
    kernel: ModuleType, iteration: tuple, shape: tuple[int, int, int], device: torch.device, copied: float
) -> float | None:
    """Return the seconds of the polar factors of float32 matrices (batch, rows, cols); None if they are not predicted.

    The model knows GPUs of some capabilities, products in half precision, and the symmetric kernel from a side on. It
    knows no iteration in one launch. `copied` is how many bytes the device copies in a second.
    """
    gpu, predictions = modelled_gpu(kernel, device), kernel.kernels.speeds.predictions
    halves = {*kernel.kernels.formats.HALF_DTYPES}
    if gpu is None or iteration.in_one_launch or not {iteration.work_dtype, iteration.chain_dtype} <= halves:
        return None
    with FakeTensorMode(allow_non_fake_inputs=True), Unguarded(), Work() as work:
        kernel.polar.factors.polar_factors(torch.empty(shape, device=device), iteration, EPS)
    tuned, dtype = kernel.kernels.gpu.tuned, iteration.work_dtype

    def is_compiled(m: int, k: int) -> bool:
        return tuned.launches_hopper_gemm(device, dtype, m, k)

    def symmetric(predictions: ModuleType, gpu, size: Size, copied: float) -> float:
        return (by_cutlass if is_compiled(*size[1:]) else by_triton)(predictions, gpu, size, copied)

    sizes = {(p.size[0], p.size[2]) for p in work.products if p.operation == SYMMETRIC}
    if any(not is_compiled(*size) and predictions.predicted_gain(gpu, *size) is None for size in sizes):
        return None
    return predicted_seconds(kernel, work, symmetric, copied, gpu)


def predicted_by_torch(kernel: ModuleType, gpu: tuple, size: Size, copied: float) -> float:
    """Return the seconds of what torch is timed with by `gpu_contest`, of half-precision X (batch, m, k).

    That is X Xᵀ; of squares it is a I + b A + c A², for which torch copies an addend and adds to a diagonal, and A B.
    """
    products = kernel.kernels.products.BATCHED
    with FakeTensorMode(), Work() as work:
        X = torch.empty(size, dtype=torch.float16, device="cuda")
        if size[1] == size[2]:
            products.commuting(X, products.gram_affine(X, 0.5, 0.5, 0.5))
        else:
            products.gram(X)
    return predicted_seconds(kernel, work, copied=copied, gpu=gpu)
