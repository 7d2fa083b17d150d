"""A few small launches of every kernel, to be run under compute-sanitizer.

compute-sanitizer --tool memcheck python -m tools.lab.sanitized VARIANTS
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

from benchmarks.built_kernel import find_variant, load_variant


def main() -> None:
    kernel = load_variant(find_variant(Path(sys.argv[1])))
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    for m, k in ((33, 65), (144, 80)):
        X = torch.randn(2, m, k, generator=generator, device=device).half()
        C = kernel.kernels.symmetric_gemm.symmetric_gemm(X, X.mT)
        kernel.kernels.symmetric_gemm.symmetric_gemm(C, C, C, 0.5, 0.5)
        kernel.orthogonalize(X)
    small = importlib.import_module(f"{kernel.__name__}.kernels.small_polar").small_polar
    for m, n in ((7, 20), (61, 130), (128, 100)):
        G = torch.randn(3, m, n, generator=generator, device=device)
        small(G, [[(3.0, -3.2, 1.2)] * 2, [(2.0, -1.5, 0.5)]], 1.0, 1e-7, torch.float16)
    weights = [torch.randn(m, n, generator=generator, device=device) for m, n in ((40, 24), (9, 3))]
    parameters = [torch.nn.Parameter(weight) for weight in weights]
    optimizer = kernel.Muon([(f"layer{i}.weight", p) for i, p in enumerate(parameters)])
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
