"""Where torch may round the factors of float32 products (TF32, bfloat16), the Gram iteration restarts or is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.spectra import SPECTRA, with_spectrum

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(params=["high", "medium"])
def allowed(request):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


def windows(kernel, device, dtype, method):
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    iteration = kernel.iteration.choose_iteration(device, dtype, (64, 256), schedule, method)
    return [len(window) for window in iteration.windows]


def test_float32_squares_of_a_gpu_restart_as_those_of_float16_do(kernel, allowed):
    """CUDA devices round to TF32, which has float16's digits, for both settings."""
    expected = windows(kernel, CUDA, torch.float16, "gram")
    assert windows(kernel, CUDA, torch.float16, "gram_float32") == expected == [2, 3]
    assert windows(kernel, CUDA, torch.float32, "gram") == expected
    torch.set_float32_matmul_precision("highest")
    assert windows(kernel, CUDA, torch.float16, "gram_float32") == [5]


def test_torchs_products_rounded_to_bfloat16_are_refused(kernel):
    """Gradients go through torch's products on a CPU, too."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        G = torch.randn(64, 256, requires_grad=True)
        with pytest.raises(ValueError, match=r"not safe .* because torch.set_float32_matmul_precision allows less"):
            kernel.orthogonalize(G, dtype=torch.float32, method="gram")
    finally:
        torch.set_float32_matmul_precision(before)


def tf32(X: Tensor) -> Tensor:
    """Round to 11 bits, as CUDA devices round the factors of products in TF32."""
    mantissa, exponent = torch.frexp(X)
    return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)


def with_rounded_factors(kernel):
    """The products of a GPU in TF32."""
    return kernel.kernels.products.BATCHED._replace(
        gram=lambda X, out=None: tf32(X) @ tf32(X).mT,
        gram_affine=lambda A, b, c, a, out=None: kernel.kernels.products.add_to_diagonal_(
            b * A + c * (tf32(A) @ tf32(A)), a
        ),
        commuting=lambda A, B, out=None: tf32(A) @ tf32(B),
        conjugated=lambda A, B: tf32(tf32(B) @ tf32(A)) @ tf32(A),
        affine=lambda B, X, a, out=None: a * X + tf32(B) @ tf32(X),
    )


@pytest.mark.parametrize("spectrum", ["one_huge", "power_law", "rank_one", "log_spaced"])
def test_restarts_keep_the_error_of_tf32_small(kernel, allowed, spectrum):
    """With one window, that of a matrix with one huge singular value was 37 times the norm of the result.

    `stability.LIMIT` bounds what rounding one Gram matrix changes in the worst case.
    """
    X = with_spectrum(SPECTRA[spectrum](64), 64, 256, seed=0)
    X /= X.norm()
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    iteration = kernel.iteration.choose_iteration(CUDA, torch.float32, (64, 256), schedule, "gram")
    iterate = kernel.kernels.newton_schulz.gram_newton_schulz
    rounded = iterate(X.float(), iteration.windows, with_rounded_factors(kernel), torch.float32)
    exact = iterate(X, iteration.windows, kernel.kernels.products.SINGLE, torch.float64)
    error = torch.linalg.matrix_norm(rounded.double() - exact, 2)
    assert error <= kernel.stability.LIMIT
