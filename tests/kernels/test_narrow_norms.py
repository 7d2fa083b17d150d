"""Norms on a device without float64: exact for float32, neither infinite nor zero, and the same bits anyhow."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.support.narrow_device import KINDS, narrow_device

pytestmark = pytest.mark.usefixtures("one_thread")

UNIT = torch.finfo(torch.float32).eps / 2
SHAPES = (1, 1, 1), (3, 5, 7), (2, 70, 40), (1, 300, 701)
DTYPES = torch.float32, torch.bfloat16, torch.float16
# Of the largest magnitude: where squares overflow, where they vanish, and where powers of two stop having an inverse.
MAGNITUDES = 1.0, 2.0**100, 2.0**-100, 2.0**-126, 2.0**118


@pytest.fixture(params=KINDS)
def device(request, portable_kernel):
    with narrow_device(portable_kernel, request.param) as narrow:
        yield narrow.device


@pytest.fixture
def norm(portable_kernel, device):
    """Norms (B) of matrices (B, m, n), as the device computes them; both are on the CPU."""

    def norm(X: Tensor) -> Tensor:
        norms = portable_kernel.kernels.normalization.frobenius_norm(X.to(device))
        assert norms.dtype == torch.float32 and norms.device == device
        return norms.flatten().cpu()

    return norm


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return matrices with entries of all magnitudes below 1, largest in every row."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.rand(shape, generator=generator) ** 40
    return torch.randn(shape, generator=generator).clamp(-4, 4).mul(sizes).div(4).to(dtype)


def allowed(m: int, n: int) -> float:
    """Return how far a norm may be off, relative to itself: half of what the sum errs, and the root's own rounding."""
    roundings = 16 + math.ceil(math.log2(max(1, math.ceil(m * n / 16))))
    return 1.01 * (roundings / 2 + 1) * UNIT


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_norm_errs_by_its_roundings(norm, shape, dtype, magnitude):
    X = random(shape, dtype)
    if X.dtype != torch.float16:
        X = X * magnitude
    exact = torch.linalg.vector_norm(X.double(), dim=(1, 2))
    # What is below the smallest normal number may be lost.
    lost = math.sqrt(X[0].numel()) * torch.finfo(torch.float32).tiny
    assert ((norm(X).double() - exact).abs() <= allowed(*shape[1:]) * exact + UNIT * lost).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_is_one_of_float32_where_a_gradient_is_needed(portable_kernel, monkeypatch, dtype):
    """Each square and each of their sums errs by a rounding of float32 at most, and the root halves what they err.

    The modelled device has no autograd, so the CPU stands in for it.
    """
    normalization, X = portable_kernel.kernels.normalization, random((2, 70, 40), dtype)
    monkeypatch.setattr(normalization, "exact_dtype", lambda *_: torch.float32)
    norms, exact = normalization.frobenius_norm(X.requires_grad_()), torch.linalg.vector_norm(X.double(), dim=(1, 2))
    assert norms.dtype == torch.float32 and norms.requires_grad
    assert ((norms.double().flatten() - exact).abs() <= 70 * 40 * UNIT * exact).all()


@pytest.mark.parametrize("magnitude", MAGNITUDES[:3])
def test_many_small_elements_beside_a_large_one_are_not_forgotten(norm, magnitude):
    """A million of 2^-10 have the norm of the one."""
    X = torch.full((1, 1024, 1025), 2.0**-10)
    X[0, 0, 0] = 1.0
    exact = torch.linalg.vector_norm(X.double())
    assert abs(norm(X * magnitude).double() - exact * magnitude) <= allowed(1024, 1025) * exact * magnitude


def test_the_largest_and_the_smallest_numbers_have_a_norm(norm):
    limits = torch.finfo(torch.float32)
    numbers = [limits.max, -limits.max, limits.tiny, 0.0, 2.0**127]
    assert norm(torch.tensor(numbers).view(-1, 1, 1)).tolist() == [abs(number) for number in numbers]
    beside_small = torch.tensor([[number, limits.tiny] for number in numbers[:2]]).unsqueeze(1)
    assert norm(beside_small).tolist() == [limits.max, limits.max]


def test_a_norm_that_float32_cannot_hold_is_infinite(norm):
    limits = torch.finfo(torch.float32)
    assert norm(torch.full((1, 1, 2), limits.max)).isposinf().all()


def test_what_is_not_finite_stays_in_its_matrix(norm):
    X = torch.ones(4, 3, 5)
    X[0, 1, 2], X[1, 0, 0], X[2, 2, 4] = math.nan, math.inf, -math.inf
    assert norm(X).isfinite().tolist() == [False, False, False, True]
    assert norm(X)[0].isnan() and norm(X)[1:3].isposinf().all()


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 3, 0)], ids=str)
def test_empty_matrices_have_no_norm(norm, shape):
    assert norm(torch.empty(shape)).tolist() == [0.0] * shape[0]


@pytest.mark.parametrize("shift", [-100, -7, 1, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_power_of_two_changes_no_bit_of_normalized_matrices(portable_kernel, device, dtype, shift):
    """Norms and their inverses are normal numbers."""
    normalize = portable_kernel.kernels.normalization.normalize
    X = torch.randn(3, 20, 30, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected, scaled = (normalize(each.to(device), torch.float32, 0.0).cpu() for each in (X, X * 2.0**shift))
    assert torch.equal(scaled, expected)


def test_a_matrix_has_the_same_bits_alone_in_a_batch_and_with_any_strides(norm):
    X = random((5, 40, 130))
    expected = norm(X)
    assert torch.equal(torch.cat([norm(each[None]) for each in X]), expected)
    assert torch.equal(norm(X.mT.contiguous().mT), expected)
    assert torch.equal(norm(torch.stack([X, X], -1)[..., 1]), expected)


def test_a_norm_with_a_gradient_is_in_float32_too(portable_kernel, monkeypatch):
    """There is no gradient on the modelled device, so this is on the CPU, as if that had no float64."""
    normalization = portable_kernel.kernels.normalization
    monkeypatch.setattr(normalization, "exact_dtype", lambda device: torch.float32)
    for magnitude in MAGNITUDES[:3]:
        X = (torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(0)) * magnitude).requires_grad_()
        norms = normalization.frobenius_norm(X)
        assert norms.dtype == torch.float32
        exact = torch.linalg.vector_norm(X.detach().double(), dim=(1, 2), keepdim=True)
        # Quotients, their squares, as many sums as there are elements, the root and the product.
        assert ((norms.detach().double() - exact).abs() <= (X[0].numel() + 5) * UNIT * exact).all()
        norms.sum().backward()
        assert torch.allclose(X.grad.double(), X.detach().double() / exact, rtol=1e-5)


def test_a_zero_matrix_has_the_gradient_zero(portable_kernel, monkeypatch):
    normalization = portable_kernel.kernels.normalization
    monkeypatch.setattr(normalization, "exact_dtype", lambda device: torch.float32)
    X = torch.zeros(1, 3, 4, requires_grad=True)
    normalization.frobenius_norm(X).sum().backward()
    assert X.grad.isfinite().all()


@pytest.mark.parametrize(
    ("name", "has_fp64", "exact"),
    [
        ("mps", True, torch.float32),
        ("xpu", False, torch.float32),
        ("xpu", True, torch.float64),
        ("cpu", False, torch.float64),
        ("cuda:1", False, torch.float64),
        ("meta", False, torch.float64),
    ],
)
def test_the_device_says_whether_it_has_float64(kernel, monkeypatch, name, has_fp64, exact):
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(has_fp64=has_fp64))
    exact_dtype, device = kernel.kernels.formats.exact_dtype, torch.device(name)
    assert exact_dtype(device) == exact
    assert exact_dtype(device, torch.bfloat16) == torch.bfloat16


def test_an_absent_gpu_of_intel_is_not_asked(kernel):
    """Tensors that say they are there are fake."""
    assert not torch.xpu.is_available()
    assert kernel.kernels.formats.exact_dtype(torch.device("xpu")) == torch.float64


def test_operations_refuse_norms_of_another_dtype(portable_kernel, device):
    native = portable_kernel.kernels.native
    X = torch.ones(2, 3, 4).to(device)
    with pytest.raises(RuntimeError, match="norms must be float32 on device 0, got Half on device 0"):
        native.frobenius_norm_(torch.zeros(2, dtype=torch.float16).to(device), X)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_compared_by_storages_where_addresses_are_handles(portable_kernel, kind):
    """Handles are nearer to one another than the elements behind them, which are not shared."""
    with narrow_device(portable_kernel, kind) as narrow:
        memory = portable_kernel.kernels.portable.memory
        made = sorted((torch.zeros(1000).to(narrow.device) for _ in range(20)), key=lambda tensor: tensor.data_ptr())
        first, second = min(zip(made, made[1:]), key=lambda pair: pair[1].data_ptr() - pair[0].data_ptr())
        assert abs(first.data_ptr() - second.data_ptr()) < 4000 or kind == "xpu"
        both = memory.Memory()
        both.write("first", first)
        both.write("second", second)
        both.check()
        both.read("part", first[10:20])
        with pytest.raises(RuntimeError, match="first and part must not share memory"):
            both.check()
