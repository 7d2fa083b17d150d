"""What Triton's kernels would have computed. Triton compiles and launches them as on a GPU, and nothing runs there."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Callable

import torch
import triton
from torch import Tensor
from triton.backends.nvidia.driver import CudaLauncher

from .operations import do, on_host


def feign_launches(kernel: ModuleType, driver: str) -> None:
    """Let launches of the package's kernels compute on the CPU; the feigned driver is in the folder `driver`."""
    _feign_later_launches(kernel)
    if hasattr(CudaLauncher, "computation"):  # of another variant in this process
        return
    triton.knobs.nvidia.libcuda_path, CudaLauncher.computation = driver, None
    initialize, launch = CudaLauncher.__init__, CudaLauncher.__call__
    computations = {"_symmetric_gemm_kernel": _symmetric, "_small_polar_kernel": _small_polar}

    def initialize_with_name(self, source: Any, metadata: Any) -> None:
        initialize(self, source, metadata)
        self.computation = computations.get(source.fn.__name__)

    def launch_and_compute(self, x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None:
        launch(self, x, y, z, stream, function, *args)
        if self.computation is None:
            raise NotImplementedError("only the package's own kernels are feigned")
        operands = args[4:]  # without metadata and hooks
        do(lambda: self.computation(kernel, *operands))

    CudaLauncher.__init__, CudaLauncher.__call__ = initialize_with_name, launch_and_compute


def _feign_later_launches(kernel: ModuleType) -> None:
    """Let the symmetric product's later launches compute, too: they call no launcher, but its part in C."""
    launch_cache = kernel.kernels.gpu.launch_cache
    prepare = launch_cache.prepare

    def prepare_and_compute(A: Tensor, B: Tensor, arranged: Any, compiled: Any) -> Callable[..., None]:
        begin, rest = prepare(A, B, arranged, compiled), (*arranged.sizes, *arranged.constants)

        def start(*operands: Any) -> None:
            begin(*operands)
            do(lambda: _symmetric(kernel, *operands, *rest))

        return start

    launch_cache.prepare = prepare_and_compute


def hopper_gemm(C: Tensor, A: Tensor, B: Tensor, D: Tensor, alpha, beta, diagonal, sections=1) -> None:
    """Write alpha A B + beta D + diagonal I into C, on the CPU."""
    _store(C, alpha * torch.bmm(A.float(), B.float()), D, beta, diagonal)


def _symmetric(kernel: ModuleType, A, B, D, C, alpha, beta, diagonal, m, k, side, *rest: Any) -> None:
    """As `kernels.gpu.symmetric_gemm._symmetric_gemm_kernel`; `rest` begins with strides of A and B.mT (b, m, k)."""
    strides, has_d = rest[:6], rest[12]
    alpha, beta, diagonal = (on_host(x).item() if isinstance(x, Tensor) else x for x in (alpha, beta, diagonal))
    left, right = (
        on_host(getattr(x, "base", x)).as_strided((len(C), m, k), lies)
        for x, lies in ((A, strides[:3]), (B, strides[3:]))
    )
    product = alpha * torch.bmm(left.float(), right.float().mT)
    _store(on_host(C), product, on_host(D) if has_d else None, beta, diagonal)


def _store(C: Tensor, product: Tensor, D: Tensor, beta: float, diagonal: float) -> None:
    result = product if D is None else product + beta * D.float()
    result.diagonal(dim1=1, dim2=2).add_(diagonal)
    result = result.to(C.dtype)
    C.copy_(result.tril() + result.tril(-1).mT)


def _small_polar(kernel: ModuleType, G, C, scratch, coefficients, ends, scale, eps, *rest: Any) -> None:
    """As `kernels.gpu.small_polar._small_polar_kernel`: bit i of `ends` says that a window ends with step i."""
    triples = [coefficients[i : i + 3] for i in range(0, len(coefficients), 3)]
    steps = [float(x) for i, triple in enumerate(triples) for x in (*triple, ends >> i & 1)]
    kernel.kernels.gpu.small_polar._on_cpu(on_host(G), on_host(C), steps, scale, eps, scratch.dtype)
