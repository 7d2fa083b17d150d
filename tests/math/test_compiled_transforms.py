"""Transforms of torch.func, and forward-mode autograd, give inside of torch.compile what they give outside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.randn(8, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
V = torch.randn(8, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TRANSFORMED = {
    "grad": lambda f: torch.func.grad(lambda x: (f(x) * V).sum())(X),
    "vjp": lambda f: torch.func.vjp(f, X)[1](V)[0],
    "jvp": lambda f: torch.func.jvp(f, (X,), (V,))[1],
    "vmap": lambda f: torch.func.vmap(f)(torch.stack([X, V])),
}


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
