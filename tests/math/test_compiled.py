"""`orthogonalize` in torch.compile: with fixed and with dynamic shapes, and inside of transforms of torch.func."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.randn(8, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
V = torch.randn(8, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TRANSFORMED = {
    "grad": lambda f: torch.func.grad(lambda x: (f(x) * V).sum())(X),
    "vjp": lambda f: torch.func.vjp(f, X)[1](V)[0],
    "jvp": lambda f: torch.func.jvp(f, (X,), (V,))[1],
    "vmap": lambda f: torch.func.vmap(f)(torch.stack([X, V])),
}


@pytest.fixture
def float32_by_default(kernel, monkeypatch):
    """Long matrices take the Gram iteration there, which chooses by size."""
    monkeypatch.setattr(kernel.iteration, "CPU_WORK_DTYPE", torch.float32)


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_compiled_transform_is_the_transform(kernel, name):
    """The tracer decides what is differentiated, so any backend shows it; this one compiles nothing."""

    def factor(x: Tensor) -> Tensor:
        return kernel.orthogonalize(x)

    expected = TRANSFORMED[name](factor)
    assert expected.count_nonzero()
    torch._dynamo.reset()
    compiled = torch.compile(lambda: TRANSFORMED[name](factor), backend="aot_eager")
    # Other operations may sum in other orders: roundings of float64, which the iteration amplifies by less than 1e6.
    torch.testing.assert_close(compiled(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(2, 16, 24), (2, 64, 160)], ids=str)
def test_compiles_to_one_graph_with_the_same_result(kernel, float32_by_default, shape):
    torch._dynamo.reset()
    G = torch.randn(shape, generator=torch.Generator().manual_seed(9))
    explained = torch._dynamo.explain(kernel.orthogonalize)(G)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)
    compiled = torch.compile(kernel.orthogonalize, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(G), kernel.orthogonalize(G))


@pytest.mark.parametrize("gain", [None, 1.5])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiling_for_a_gpu_warns_of_no_cache(kernel, monkeypatch, dynamic, gain):
    """Also where the symmetric kernel is chosen."""
    if gain is not None:
        choice = kernel.kernels.speeds.gains.Gain(gain, "shipped")
        monkeypatch.setattr(kernel.kernels.products, "symmetric_choice", lambda *asked: choice)
    torch._dynamo.reset()
    factor = torch.compile(
        lambda G: kernel.orthogonalize(G, method="standard"), fullgraph=True, dynamic=dynamic, backend="eager"
    )
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo detected")
        assert factor(torch.empty(2, 128, 256, device="cuda", dtype=torch.float16)).shape == (2, 128, 256)


def test_compiles_to_one_graph_with_dynamic_shapes(kernel, float32_by_default):
    """The tracer takes numbers of the program, such as coefficients, for symbols then."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda G: kernel.orthogonalize(G), fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in (8, 16), (9, 33), (3, 40, 12), (64, 160), (300, 70):
        G = torch.randn(shape, generator=torch.Generator().manual_seed(10))
        assert torch.equal(compiled(G), kernel.orthogonalize(G))


def test_a_number_of_steps_that_varies_is_compiled_anew(kernel):
    """The tracer makes a symbol of a number that has changed."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, steps: kernel.orthogonalize(x, ns_steps=steps), fullgraph=True, backend="aot_eager"
    )
    for steps in (4, 5, 3):
        torch.testing.assert_close(compiled(X, steps), kernel.orthogonalize(X, ns_steps=steps), rtol=1e-9, atol=1e-9)
