"""Where torch may round the factors of float32 products (TF32, bfloat16), the Gram iteration restarts or is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

from tests.support.spectra import SPECTRA, with_spectrum

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def allow():
    """`torch.set_float32_matmul_precision`, until the end of the test."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def windows(kernel, device, dtype, method):
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    iteration = kernel.iteration.choose_iteration(device, dtype, (64, 256), schedule, method)
    return [len(window) for window in iteration.windows]


@pytest.mark.parametrize("setting", ["high", "medium"])
def test_float32_squares_of_a_gpu_restart_as_those_of_float16_do(kernel, allow, setting):
    """CUDA devices round to TF32, which has float16's digits, for both settings."""
    allow(setting)
    expected = windows(kernel, CUDA, torch.float16, "gram")
    assert windows(kernel, CUDA, torch.float16, "gram_float32") == expected == [2, 3]
    assert windows(kernel, CUDA, torch.float32, "gram") == expected
    allow("highest")
    assert windows(kernel, CUDA, torch.float16, "gram_float32") == [5]


def test_a_setting_rounds_to_its_format(kernel, allow):
    """TF32 has 11 bits, as float16 has."""
    formats = kernel.kernels.formats
    for setting, *dtypes in (("highest", torch.float32, torch.float32), ("medium", torch.float16, torch.bfloat16)):
        allow(setting)
        assert formats.float32_roundoffs() == tuple(map(formats.unit_roundoff, dtypes))


@pytest.mark.parametrize("setting", ["high", "medium"])
def test_apples_gpus_round_no_factor(kernel, allow, setting):
    """Torch's settings are about CUDA devices and about oneDNN, which multiplies on other ones."""
    allow(setting)
    assert windows(kernel, torch.device("mps"), torch.float32, "gram") == [5]


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="this processor rounds nothing to bfloat16")
def test_torchs_products_rounded_to_bfloat16_are_refused(kernel, allow):
    """Gradients go through torch's products on a CPU, too."""
    allow("medium")
    G = torch.randn(64, 256, requires_grad=True)
    with pytest.raises(ValueError, match=r"not safe .* because torch.set_float32_matmul_precision lets torch round"):
        kernel.orthogonalize(G, dtype=torch.float32, method="gram")


@pytest.mark.parametrize("table, safe", [("SINGLE", False), ("NATIVE", True)])
def test_products_that_were_chosen_by_time_round_as_they_did_before(kernel, allow, monkeypatch, table, safe):
    """A table says how it was chosen; torch's is still torch's."""
    products = getattr(kernel.kernels.products, table)._replace(source="measured here")
    monkeypatch.setitem(kernel.iteration.choose_iteration.__globals__, "select_products", lambda *_: products)
    monkeypatch.setattr(kernel.iteration, "torch_is_slow", lambda _: False)
    allow("medium")
    if safe:
        assert windows(kernel, CPU, torch.float32, "gram") == [5]
    else:
        with pytest.raises(ValueError, match="not safe"):
            windows(kernel, CPU, torch.float32, "gram")


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


@pytest.mark.parametrize("spectrum", ["one_huge", "clustered", "rank_one", "log_spaced"])
def test_restarts_keep_the_error_of_tf32_small(kernel, allow, spectrum):
    """`stability.LIMIT` bounds what rounding a Gram matrix changes in the worst case.

    Spread over the matrix it is that bound divided by the root of the side. Without restarts the error is larger.
    """
    allow("high")
    X = with_spectrum(SPECTRA[spectrum](64), 64, 256, seed=0)
    X /= X.norm()
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    iteration = kernel.iteration.choose_iteration(CUDA, torch.float32, (64, 256), schedule, "gram")
    iterate = kernel.kernels.newton_schulz.gram_newton_schulz
    exact = iterate(X, iteration.windows, kernel.kernels.products.SINGLE, torch.float64)

    def error(windows) -> float:
        rounded = iterate(X.float(), windows, with_rounded_factors(kernel), torch.float32)
        return torch.linalg.matrix_norm(rounded.double() - exact, 2).item()

    assert error(iteration.windows) <= kernel.stability.LIMIT / 64**0.5 < error([sum(iteration.windows, ())])


@pytest.mark.parametrize("dtype, noted", [("float16", True), ("bfloat16", True), ("float32", False)])
def test_float32_squares_of_a_gpu_are_noted_where_the_rest_is_in_half_precision(kernel, dtype, noted):
    """There they cost more than what was asked for, and depend on a setting that nothing else does."""
    with FakeTensorMode():
        matrix = Parameter(torch.ones(8, 16, device="cuda"))
        optimizer = kernel.Muon([("up.weight", matrix)], ns_dtype=dtype, ns_method="gram_float32")
        notes = optimizer.explain().notes
    said = [note for note in notes if note.startswith("gram_float32 multiplies the Gram matrices of up.weight in")]
    assert len(said) == noted
