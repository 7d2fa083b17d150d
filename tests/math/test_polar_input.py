"""What `orthogonalize` does not take, and what it answers."""

from __future__ import annotations

import pytest
import torch

from tests.support.sharded_models import one_thread


@pytest.mark.parametrize(
    "G, options, words",
    [
        (torch.zeros(3), {}, "(3,)"),
        (torch.zeros(3, 3, dtype=torch.int64), {}, "int64"),
        (torch.zeros(3, 3, dtype=torch.complex64), {}, "complex64"),
        (torch.zeros(3, 3).to(torch.float8_e4m3fn), {}, "float8_e4m3fn"),
        (torch.zeros(3, 3), dict(eps=-1.0), "-1.0"),
        (torch.zeros(3, 3), dict(eps=float("nan")), "nan"),
        (torch.zeros(3, 3), dict(eps=float("inf")), "finite, got inf"),
        (torch.zeros(3, 3), dict(eps=10**400), "finite, got 1000"),
        (torch.zeros(3, 3), dict(dtype=torch.int8), "int8"),
        (torch.zeros(3, 3), dict(dtype="float32"), "got 'float32'"),
        (torch.eye(3).to_sparse(), {}, "torch.sparse_coo"),
        (torch.zeros(3, 3), dict(ns_steps=0), "got 0"),
        (torch.zeros(3, 3), dict(ns_coefficients="quartic"), "quartic"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_input_is_named(kernel, G, options, words):
    with pytest.raises(ValueError) as raised:
        kernel.orthogonalize(G, **options)
    assert words in str(raised.value)


def test_what_is_no_tensor_is_named(kernel):
    with pytest.raises(TypeError, match=r"needs a tensor, got list: write torch\.as_tensor"):
        kernel.orthogonalize([[1.0]])


def test_a_flag_is_no_number_of_steps(kernel):
    with pytest.raises(TypeError, match="ns_steps must be an integer, got True"):
        kernel.orthogonalize(torch.eye(4), ns_steps=True)


def test_shards_are_named(kernel):
    class Sharded(torch.Tensor):
        def full_tensor(self):
            raise NotImplementedError

    shards = torch.ones(4, 4).as_subclass(Sharded)
    with pytest.raises(TypeError, match=r"orthogonalize needs a whole matrix, got a DTensor: write G\.full_tensor\(\)"):
        kernel.orthogonalize(shards)
    with pytest.raises(TypeError, match=r"transpose needs a whole matrix, got a DTensor: write X\.full_tensor\(\)"):
        kernel.matmul_transpose(shards)
    with pytest.raises(TypeError, match="out must be a plain tensor or None, got Sharded"):
        kernel.matmul_transpose(torch.ones(4, 4), shards)


def test_nothing_has_a_gradient_of_nothing(kernel):
    empty = torch.zeros(0, 4, 4, requires_grad=True)
    assert torch.autograd.grad(kernel.orthogonalize(empty).sum(), empty)[0].shape == empty.shape


@pytest.mark.parametrize("n", [16, 100, 257, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_columns_have_the_bits_of_rows(kernel, n, dtype):
    """Their transposes count as contiguous, whatever their strides: torch's products would take another path."""
    rows = torch.randn(5, 1, n, dtype=dtype, generator=torch.Generator().manual_seed(0))
    columns = torch.empty(5, n, 1, dtype=dtype).copy_(rows.mT)  # with strides of its own
    with one_thread():
        factors, of_columns = (kernel.orthogonalize(G, method="standard") for G in (rows, columns))
    assert torch.equal(of_columns.mT, factors)
