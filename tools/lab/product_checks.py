"""Laws of the symmetric product on the device itself; each check returns what is wrong, nothing where all is right.

Operands are drawn anew at every call; the seed is in what a check says. Results hold NaN before they are written.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tools.lab.items import Lab

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# One step of a published Newton-Schulz iteration has such coefficients: they cancel, so that roundings show.
ALPHA, BETA = 2.0315, -4.775

# Multiples of 16 that no tile divides: operands are aligned, and tiles at the edge are cut.
ALIGNED, TINY_ALIGNED = (272, 208), (48, 32)
SIZES = ((1, 7), (7, 1), (33, 65), (127, 200), ALIGNED)
TINY_SIZES = ((1, 7), (17, 9))


class Draw:
    """Random operands on a device, from a seed that no other draw has."""

    def __init__(self, device: torch.device):
        self.generator = torch.Generator(device)
        self.seed = self.generator.seed()
        self.device = device

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal entries, such that products over the last dimension are about 1."""
        drawn = torch.randn(shape, generator=self.generator, device=self.device)
        return (drawn / math.sqrt(max(shape[-1], 1))).to(dtype)

    def symmetric(self, batch: int, m: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Symmetric matrices whose eigenvalues are 1 / n, of both signs."""
        drawn = torch.randn(batch, m, m, generator=self.generator, device=self.device, dtype=torch.float64)
        vectors = torch.linalg.qr(drawn).Q
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64, device=self.device).repeat(m)[:m]
        values = signs / torch.arange(1, m + 1, dtype=torch.float64, device=self.device)
        S = vectors @ torch.diag(values) @ vectors.mT
        return ((S + S.mT) / 2).to(dtype)


def every_other(x: Tensor) -> Tensor:
    """Return the values of x in every other row and column of a larger buffer, not from its start."""
    buffer = x.new_full((x.size(0) + 1, 2 * x.size(1) + 1, 2 * x.size(2) + 3), math.nan)
    return buffer[1:, 1::2, 3::2].copy_(x)


def shifted(x: Tensor) -> Tensor:
    """Return the values of x at an address that is no multiple of 16 bytes."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def polynomials(X: Tensor) -> tuple[Tensor, Tensor]:
    """Return two polynomials of one symmetric matrix, which commute up to their rounding."""
    S = X.double() @ X.double().mT
    identity = torch.eye(S.size(-1), dtype=S.dtype, device=S.device)
    return (3 * S + 2 * S @ S).to(X.dtype), (identity - S @ S).to(X.dtype)


LAYOUTS = {
    "contiguous": lambda X: (X, X.mT),
    "transposed": lambda X: (X.mT.contiguous().mT, X.mT),
    "sliced": lambda X: (every_other(X), every_other(X).mT),
    "misaligned": lambda X: (shifted(X), shifted(X).mT),
    "expanded": lambda X: (X[:1].expand_as(X), X[:1].expand_as(X).mT),
    "polynomials": polynomials,
}


def compare(C: Tensor, A: Tensor, B: Tensor, D: Tensor | None, scalars: tuple[float, float]) -> list[str]:
    """Return how C misses alpha A B + beta D: an error above twice torch's and an ulp of the largest entry, asymmetry.

    The reference is the lower triangle, twice: rounded polynomials of one matrix no longer commute exactly.
    """
    alpha, beta = scalars
    addend = A.new_zeros(()).expand_as(C) if D is None else D
    exact = alpha * A.double() @ B.double() + beta * addend.double()
    mirrored = exact.tril() + exact.tril(-1).mT
    torchs = (torch.baddbmm(addend, A, B, alpha=alpha, beta=beta).double() - exact).abs().max().item()
    error = (C.double() - mirrored).abs().max().item()
    allowed = max(2 * torchs, torch.finfo(A.dtype).eps * exact.abs().max().item())
    problems = [] if error <= allowed else [f"error {error:.1e} where {allowed:.1e} is allowed"]
    return problems if torch.equal(C, C.mT) else [*problems, "not symmetric"]


def poisoned(A: Tensor) -> Tensor:
    return A.new_full((A.size(0), A.size(1), A.size(1)), math.nan)


def check_configuration(lab: Lab, dtype: torch.dtype, config: tuple) -> list[str]:
    """A launch with one configuration on aligned operands: the error, symmetry, and the bits of a matrix alone."""
    module, draw = lab.kernel.kernels.symmetric_gemm, Draw(lab.device)
    m, k = TINY_ALIGNED if lab.tiny else ALIGNED
    X, S = draw.normal(3, m, k, dtype=dtype), draw.symmetric(3, m, dtype)

    def launch(A: Tensor, B: Tensor, D: Tensor | None, scalars: tuple) -> Tensor:
        C = poisoned(A)
        module.launch_symmetric_gemm(A, B, D, C, scalars, module.Config(*config))
        return C

    problems = []
    for A, B, D, scalars in ((X, X.mT, None, (1.0, 0.0)), (S, S, S, (ALPHA, BETA))):
        C = launch(A, B, D, scalars)
        problems += compare(C, A, B, D, scalars)
        if not torch.equal(launch(A[1:2], B[1:2], None if D is None else D[1:2], scalars), C[1:2]):
            problems.append("other bits alone than in a batch")
    return said(problems, draw)


def check_layout(lab: Lab, dtype: torch.dtype, layout: str) -> list[str]:
    """The operation, as it chooses to launch, on operands of one layout, into a result of odd strides."""
    module, draw, problems = lab.kernel.kernels.symmetric_gemm, Draw(lab.device), []
    for m, k in TINY_SIZES if lab.tiny else SIZES:
        A, B = LAYOUTS[layout](draw.normal(3, m, k, dtype=dtype))
        D = draw.symmetric(3, m, dtype)
        buffer = A.new_full((4, 2 * m + 1, 2 * m + 3), 7.0)
        C = buffer[1:, 1::2, 3::2].fill_(math.nan)
        module.symmetric_gemm(A, B, D, ALPHA, BETA, out=C)
        problems += [f"{m} x {k}: {problem}" for problem in compare(C, A, B, D, (ALPHA, BETA))]
        C.fill_(7.0)
        if not (buffer == 7.0).all():
            problems.append(f"{m} x {k}: written outside of the result")
    return said(problems, draw)


def check_scalars(lab: Lab, dtype: torch.dtype) -> list[str]:
    """Numbers and tensors on the device, as coefficients, give the same bits."""
    symmetric_gemm, draw = lab.kernel.kernels.symmetric_gemm.symmetric_gemm, Draw(lab.device)
    m = (TINY_ALIGNED if lab.tiny else ALIGNED)[0]
    S = draw.symmetric(2, m, dtype)
    numbers = [torch.tensor(x, dtype=torch.float32).item() for x in (ALPHA, BETA)]
    tensors = [torch.tensor(x, dtype=torch.float32, device=lab.device) for x in numbers]
    same = torch.equal(symmetric_gemm(S, S, S, *numbers), symmetric_gemm(S, S, S, *tensors))
    return said([] if same else ["other bits"], draw)


def check_nan(lab: Lab, dtype: torch.dtype) -> list[str]:
    """A NaN reaches its matrix's row and column, and changes no other bit."""
    symmetric_gemm, draw = lab.kernel.kernels.symmetric_gemm.symmetric_gemm, Draw(lab.device)
    m, k = TINY_ALIGNED if lab.tiny else ALIGNED
    X = draw.normal(3, m, k, dtype=dtype)
    clean, row = symmetric_gemm(X, X.mT), m // 2
    X[1, row, 3] = math.nan
    C = symmetric_gemm(X, X.mT)
    hit = torch.zeros_like(C, dtype=torch.bool)
    hit[1, row, :] = hit[1, :, row] = True
    problems = [] if torch.equal(C.isnan(), hit) else ["elsewhere than in its row and column"]
    return said(problems if torch.equal(C[~hit], clean[~hit]) else [*problems, "other bits beside it"], draw)


def said(problems: list[str], draw: Draw) -> list[str]:
    return [f"{problem} (seed {draw.seed})" for problem in problems]
