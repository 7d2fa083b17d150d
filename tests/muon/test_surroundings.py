"""What is set around a step, such as autocast or another default dtype, does not change it, nor `orthogonalize`."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from tests.support.sharded_models import bits_equal

SHAPES = ((24, 40), (40, 24), (16, 16))
AUTOCAST = [torch.bfloat16, torch.float16]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


AROUND = {
    **{f"autocast {dtype}": lambda device, dtype=dtype: torch.autocast(device, dtype=dtype) for dtype in AUTOCAST},
    "inference mode": lambda _: torch.inference_mode(),
    **{f"default {dtype}": lambda _, dtype=dtype: default_dtype(dtype) for dtype in (torch.bfloat16, torch.float64)},
}


def trained(kernel, device: str, around, **settings) -> list[torch.Tensor]:
    """Return parameters and state after three steps, each inside of `around(device)`."""
    draw = torch.Generator().manual_seed(0)

    def random(shape):
        return torch.randn(shape, generator=draw, device="cpu", dtype=torch.float32).to(device)

    named = [(f"layers.{i}.weight", nn.Parameter(random(shape))) for i, shape in enumerate(SHAPES)]
    named.append(("norm.bias", nn.Parameter(random((24,)))))
    optimizer = kernel.Muon(named, **settings)
    for _ in range(3):
        for _, p in named:
            p.grad = random(p.shape)
        with around(device):
            optimizer.step()
            optimizer.metrics()
    return [p.detach() for _, p in named] + [value for _, p in named for value in optimizer.state[p].values()]


@pytest.mark.parametrize("method", ["standard", "gram", "gram_float32"])
@pytest.mark.parametrize("work", ["float16", "float32"])
@pytest.mark.parametrize("name", AROUND)
def test_steps_have_the_bits_that_they_have_without(kernel, device, name, work, method):
    settings = {"ns_dtype": work, "ns_method": method}
    expected = trained(kernel, device, contextlib.nullcontext, **settings)
    actual = trained(kernel, device, AROUND[name], **settings)
    assert all(map(bits_equal, actual, expected))


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("work", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", AROUND)
def test_orthogonalize_has_the_bits_that_it_has_without(kernel, device, name, work, method):
    """In float16 a CPU multiplies by torch's products, which autocast would change."""
    G = torch.randn(2, 24, 40, generator=torch.Generator().manual_seed(1), device="cpu", dtype=torch.float32).to(device)
    expected = kernel.orthogonalize(G, dtype=work, method=method), kernel.matmul_transpose(G)
    with AROUND[name](device):
        actual = kernel.orthogonalize(G, dtype=work, method=method), kernel.matmul_transpose(G)
    assert all(map(bits_equal, actual, expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_momentum_is_converted_into_8_bits_as_without(kernel, device, dtype):
    p = nn.Parameter(torch.ones(8, 100, dtype=torch.float32))
    optimizer = kernel.Muon([("up.weight", p)])
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.param_groups[0]["momentum_dtype"] = "int8"
    with default_dtype(dtype):
        optimizer.state_dict()
    state = optimizer.state[p]
    assert (state["momentum_buffer"].dtype, state["momentum_scale"].dtype) == (torch.int8, torch.float32)


def test_what_is_no_process_group_is_refused(kernel):
    exchange = kernel.ExchangeOptions(process_group="world")
    with pytest.raises(ValueError, match=r"torch\.distributed\.ProcessGroup with this process, rank 0, got 'world'"):
        kernel.Muon([nn.Parameter(torch.ones(4, 4))], exchange=exchange)
