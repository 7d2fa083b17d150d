"""Steps and orthogonalizations on a GPU: trained, captured, compiled and exchanged; a CPU rehearses what it can."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.inside import always_exchanged, iterate
from tests.support.symmetric_products import normal
from tests.support.triton_gpu import skip_without_triton

# A CPU only rehearses, and multiplies halves slowly.
UNIT = 64 if torch.cuda.is_available() else 16
SIDES = {"square": (2, 4, 4), "wide": (2, 4, 16), "tall": (3, 10, 3)}
SHAPES = {name: (batch, rows * UNIT, cols * UNIT) for name, (batch, rows, cols) in SIDES.items()}
HALF_DTYPES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALF_DTYPES)
STEPS, LR = 3, 0.02

Gradients = dict[str, Tensor]


def distance(x: Tensor, reference: Tensor) -> float:
    """Relative error in the Frobenius norm; what is not a number is infinitely far."""
    error = ((x.double().cpu() - reference.cpu()).norm() / reference.cpu().norm()).item()
    return error if error == error else float("inf")


def drawn(seed: int) -> Gradients:
    """Values for a vector and for matrices of several shapes, each of which is a batch by itself."""
    matrices = {f"{name}.weight": normal(*shape[1:], seed=seed + i) for i, (name, shape) in enumerate(SHAPES.items())}
    return {**matrices, "norm.weight": normal(100, seed=seed)}


def copied(values: Gradients) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(value.clone()) for name, value in values.items()}


def muon(kernel, parameters, dtype, **settings):
    return kernel.Muon(parameters.items(), **{"lr": LR, "ns_dtype": dtype, **settings})


def take_step(optimizer, parameters, gradients: Gradients) -> None:
    for name, p in parameters.items():
        p.grad = gradients[name].clone()
    optimizer.step()


def assert_same_bits(parameters, expected) -> None:
    assert [name for name, p in parameters.items() if not torch.equal(p, expected[name])] == []


ITERATIONS = [(torch.float16, "gram", "wide"), *itertools.product(HALF_DTYPES, ["standard"], SHAPES)]


@pytest.mark.parametrize("dtype, method, name", ITERATIONS)
def test_symmetric_products_err_at_most_twice_as_much(kernel, device, dtype, method, name):
    """As torch's. The Gram iteration is for long matrices: a square's smallest singular value is left to luck."""
    skip_without_triton(kernel, device)
    G = normal(*SHAPES[name])
    exact = kernel.orthogonalize(G.double().cpu(), method="standard")
    ours, torchs = (distance(iterate(kernel, G, dtype, method, by), exact) for by in ("SYMMETRIC", "BATCHED"))
    assert ours <= 2 * torchs


def test_a_compiled_orthogonalization_errs_at_most_twice_as_much(kernel, device):
    G = normal(*SHAPES["wide"])
    exact = kernel.orthogonalize(G.double().cpu(), method="standard")

    def factors(G: Tensor) -> Tensor:
        return kernel.orthogonalize(G, dtype=torch.float16)

    compiled = torch.compile(factors, fullgraph=True, backend="inductor" if device == "cuda" else "eager")
    assert distance(compiled(G), exact) <= 2 * distance(factors(G), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_training_stays_as_near_to_float64_as_on_a_cpu(kernel, device, dtype):
    """Within four times: roundings of two machines, each of which training may amplify otherwise."""
    with torch.device("cpu"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(96, 192), nn.Tanh(), nn.Linear(192, 96))
        inputs, targets = torch.randn(32, 96), torch.randn(32, 96)

    def trained(place: str, stored: torch.dtype, ns_dtype: torch.dtype) -> Tensor:
        network = copy.deepcopy(model).to(place, stored)
        optimizer = kernel.Muon(network.named_parameters(), lr=LR, ns_dtype=ns_dtype)
        for _ in range(10):
            optimizer.zero_grad()
            (network(inputs.to(place, stored)) - targets.to(place, stored)).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten().double().cpu() for p in network.parameters()])

    exact = trained("cpu", torch.float64, torch.float64)
    cpus = distance(trained("cpu", torch.float32, dtype), exact)
    assert distance(trained(device, torch.float32, dtype), exact) <= 4 * cpus


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaled_steps_have_the_bits_of_unscaled_ones(kernel, device, dtype, capturable):
    """And a step with an infinite gradient moves nothing; the scale is a power of two, which divides out exactly."""
    start = drawn(0)
    plain, scaled = copied(start), copied(start)
    without, within = muon(kernel, plain, dtype), muon(kernel, scaled, dtype, capturable=capturable)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=10**6)
    scaler.scale(torch.ones(()))  # which makes its tensors
    for step, overflow in enumerate([False, False, True, False]):
        gradients = drawn(10 * (step + 1))
        for name, p in scaled.items():
            p.grad = scaler.get_scale() * gradients[name]
        if overflow:
            scaled["norm.weight"].grad[0] = torch.inf
        else:
            take_step(without, plain, gradients)
        scaler.step(within)
        scaler.update()
        assert_same_bits(scaled, plain)
    assert scaler.get_scale() == 512.0


@contextlib.contextmanager
def group_of_one(device: str, folder: Path) -> Iterator[dist.ProcessGroup]:
    """This process as the only rank of a group on the device."""
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exchanged_matrices_get_the_bits_of_those_that_are_not(kernel, device, dtype, tmp_path):
    """Matrices of one chunk each show that chunks overtake each other."""
    start = drawn(0)
    alone, shared = copied(start), copied(start)
    without = muon(kernel, alone, dtype)
    with (
        group_of_one(device, tmp_path) as group,
        always_exchanged(kernel),
        mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as sent,
    ):
        exchange = kernel.ExchangeOptions(process_group=group, chunk_bytes=1)
        within = muon(kernel, shared, dtype, exchange=exchange)
        for step in range(STEPS):
            gradients = drawn(10 * (step + 1))
            take_step(without, alone, gradients)
            take_step(within, shared, gradients)
    assert_same_bits(shared, alone)
    assert sent.call_count == 2 * len(SHAPES) * STEPS


def captured(warm_up: Callable[[], object], work: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    """A graph of `work` and what it returned; warming up compiles, and makes what libraries keep, outside of it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm_up()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("what", ["symmetric_gemm", "orthogonalize"])
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_a_replayed_orthogonalization_has_the_eager_bits(kernel, device, dtype, what):
    if what == "symmetric_gemm":
        skip_without_triton(kernel, device)
    symmetric_gemm = kernel.kernels.gpu.symmetric_gemm.symmetric_gemm
    works = {
        "symmetric_gemm": lambda X: symmetric_gemm(X, X.mT, alpha=2.0),
        "orthogonalize": lambda X: kernel.orthogonalize(X, dtype=dtype),
    }
    for shape in SHAPES.values():
        X, later = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype, seed=1)
        expected = works[what](later)
        graph, result = captured(lambda X=X: works[what](X), lambda X=X: works[what](X))
        X.copy_(later)
        graph.replay()
        assert torch.equal(result, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_replayed_step_has_the_eager_bits(kernel, device, dtype):
    """On new gradients and with another learning rate."""
    start = drawn(0)
    eager, replayed = copied(start), copied(start)
    rates = [torch.tensor(LR) for _ in range(2)]
    optimizers = [muon(kernel, p, dtype, lr=lr, capturable=True) for p, lr in zip((eager, replayed), rates)]
    take_step(optimizers[0], eager, drawn(10))
    graph, _ = captured(lambda: take_step(optimizers[1], replayed, drawn(10)), optimizers[1].step)
    for step in range(1, STEPS + 1):
        gradients = drawn(10 * (step + 1))
        for lr in rates:
            lr.fill_(LR / step)
        take_step(optimizers[0], eager, gradients)
        for name, p in replayed.items():
            p.grad.copy_(gradients[name])
        graph.replay()
    assert_same_bits(replayed, eager)
