"""Half precision: parameters that are rounded at random, and momentum of a dtype of its own."""

import copy
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import (
    gradient_of,
    named_parameters,
    same_bits,
    state_of,
    take_steps,
)

pytestmark = pytest.mark.kernels_ci


def rounded(kernel, steps, **options):
    """bfloat16 parameters after `steps` whose updates are far below half of their spacing."""
    params = {f"{i}.weight": Parameter(torch.ones(16, 16, dtype=torch.bfloat16)) for i in range(2)}
    params["stack.weight"] = Parameter(torch.ones(32, 16, dtype=torch.bfloat16))
    split = {"params": [("stack.weight", params.pop("stack.weight"))], "split_rows": (16, 16)}
    optimizer = kernel.Muon([{"params": params.items()}, split], weight_decay=0.0, **options)
    params.update(split["params"])
    seen = []
    for _ in range(steps):
        for p in params.values():
            p.grad = torch.eye(16, dtype=torch.bfloat16).repeat(p.shape[0] // 16, 1)
        optimizer.step()
        seen.append(torch.cat(list(params.values())).detach().float())
    return torch.stack(seen)


def test_stochastic_rounding_is_unbiased_where_nearest_stalls(kernel):
    """32 steps of 2**-14 on the diagonals of four matrices; 1 has neighbours 2**-8 below and 2**-7 above."""
    lr = 2.0**-14 / (0.2 * 4)
    nearest, ours = (rounded(kernel, 32, lr=lr, stochastic_rounding=flag) for flag in (False, True))
    assert torch.equal(nearest[-1], torch.ones(64, 16))
    diagonal = torch.eye(16, dtype=torch.bool).repeat(4, 1)
    assert torch.equal(ours[-1][~diagonal], torch.ones(64, 15).flatten())
    moved = 1 - ours[-1][diagonal].double()
    # A polar factor's diagonal is within [0.86, 1.14]. The sum of 64 diagonals of 32 steps, each down by 2**-8 with
    # a chance of 2**-6 (a value below 1 has half the spacing), has a standard deviation of 2**-8 sqrt(64 * 32 * 2**-6).
    expected, deviation = 64 * 32 * 2**-14, 2**-8 * math.sqrt(64 * 32 * 2**-6)
    assert abs(moved.sum() - expected) < 0.14 * expected + 4 * deviation


def test_stochastic_rounding_draws_anew_each_time(kernel):
    """Draws differ between steps, matrices and parameters.

    With a chance of one half for each of 16 elements, two draws are alike with a chance of 2**-16.
    """
    seen = rounded(kernel, 4, lr=2.0**-9 / (0.2 * 4), stochastic_rounding=True)
    diagonals = torch.stack([torch.stack([m.diagonal() for m in state.split(16)]) for state in seen])
    steps = torch.diff(torch.cat([torch.ones(1, 4, 16), diagonals]), dim=0).ne(0).flatten(0, 1)
    assert len({tuple(row.tolist()) for row in steps}) == len(steps)


@pytest.mark.parametrize("wrapper", ["", "_orig_mod."])
def test_stochastic_rounding_resumes_bit_for_bit(kernel, wrapper):
    """Also if the model is compiled only now, which changes its names."""
    options = dict(lr=0.02, stochastic_rounding=True, momentum_dtype=torch.float32)
    params = named_parameters(torch.bfloat16)
    optimizer = kernel.Muon(params.items(), **options)
    take_steps(optimizer, params, range(3))
    resumed = copy.deepcopy(params)
    other = kernel.Muon([(f"{wrapper}{name}", p) for name, p in resumed.items()], **options)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take_steps(optimizer, params, range(3, 6))
    take_steps(other, resumed, range(3, 6))
    assert same_bits(params, resumed)


def test_stochastic_rounding_leaves_full_precision_alone(kernel):
    results = []
    for flag in (False, True):
        params = named_parameters()
        params["half.weight"] = Parameter(torch.randn(24, 12, generator=torch.Generator().manual_seed(0)).bfloat16())
        take_steps(kernel.Muon(params.items(), stochastic_rounding=flag), params, range(2))
        results.append(params)
    different = [name for name in results[0] if not torch.equal(results[0][name], results[1][name])]
    assert different == ["half.weight"]


@pytest.mark.parametrize("dtype", ["float32", torch.bfloat16, "float64"], ids=str)
def test_momentum_keeps_its_dtype_through_files(kernel, dtype):
    params = named_parameters(torch.float16)
    optimizer = kernel.Muon(params.items(), momentum_dtype=dtype)
    take_steps(optimizer, params, range(2))
    resumed = copy.deepcopy(params)
    other = kernel.Muon(resumed.items())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert other.state[resumed["up.weight"]]["momentum_buffer"].dtype == wanted
    assert other.state[resumed["up.bias"]]["exp_avg"].dtype == torch.float32
    take_steps(optimizer, params, range(2, 4))
    take_steps(other, resumed, range(2, 4))
    assert same_bits(params, resumed) and same_bits(state_of(optimizer, params), state_of(other, resumed))


CHANGES = [
    *itertools.permutations(["float32", "bfloat16", "float64"], 2),
    (None, "bfloat16"), ("bfloat16", None), ("int8", "bfloat16"), ("int8", None), ("float64", "int8"),
]  # fmt: skip


@pytest.mark.parametrize("before, after", CHANGES)
def test_momentum_has_the_dtype_that_its_group_names(kernel, before, after):
    """After a change, too. None leaves it as it is, but for 8 bits."""
    params, others = named_parameters(), named_parameters()
    optimizer, other = (kernel.Muon(p.items(), momentum_dtype=before) for p in (params, others))
    for each, its_params in ((optimizer, params), (other, others)):
        take_steps(each, its_params, range(2))
    (group,) = (group for group in optimizer.param_groups if group["use_muon"])
    group["momentum_dtype"] = after
    kept = before if after is None and before != "int8" else after
    converted = optimizer.state_dict()["state"]
    buffers = [optimizer.state[params[name]]["momentum_buffer"] for name in ("up.weight", "down.weight")]
    assert {buffer.dtype for buffer in buffers} == {getattr(torch, kept or "float32")}
    if "int8" not in (before, after):
        theirs = [other.state[others[name]]["momentum_buffer"] for name in ("up.weight", "down.weight")]
        exact = [buffer.to(buffers[0].dtype) for buffer in theirs]
        assert all(map(torch.equal, buffers, exact))
    resumed = copy.deepcopy(params)
    fresh = kernel.Muon(resumed.items(), momentum_dtype=after)
    fresh.load_state_dict(copy.deepcopy({**optimizer.state_dict(), "state": converted}))
    take_steps(optimizer, params, [2])
    take_steps(fresh, resumed, [2])
    assert same_bits(params, resumed) and same_bits(state_of(optimizer, params), state_of(fresh, resumed))


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", None])
def test_momentum_of_a_file_without_the_setting_gets_the_dtype_of_the_group(kernel, dtype):
    p, q = (Parameter(torch.ones(8, 16)) for _ in range(2))
    theirs = torch.optim.Muon([p], lr=0.1)
    p.grad = gradient_of("p", p, 0)
    theirs.step()
    exact = theirs.state[p]["momentum_buffer"]
    for load in (
        lambda optimizer: optimizer.load_state_dict(theirs.state_dict()),
        lambda optimizer: kernel.import_state(optimizer, theirs.state_dict(), "torch"),
    ):
        ours = kernel.Muon([q], momentum_dtype=dtype)
        load(ours)
        assert torch.equal(ours.state[q]["momentum_buffer"], exact.to(getattr(torch, dtype or "float32")))


def test_float32_momentum_averages_half_precision_gradients(kernel):
    p = Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))
    optimizer = kernel.Muon([p], momentum=0.95, momentum_dtype=torch.float32)
    expected = torch.zeros(8, 8, dtype=torch.float64)
    for seed in range(8):
        p.grad = gradient_of("p", p, seed)
        expected = 0.95 * expected + 0.05 * p.grad.double()
        optimizer.step()
    # Eight steps of one rounding each, which bfloat16 would make 2**16 times as large.
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"].double(), expected, rtol=0, atol=8 * 2**-24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_casting_the_model_keeps_momentum_and_resumes(kernel, dtype):
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), lr=0.02)
    take_steps(optimizer, params, [0])
    for p in params.values():
        p.data = p.data.to(dtype)
    take_steps(optimizer, params, [1])
    assert optimizer.state[params["up.weight"]]["momentum_buffer"].dtype == torch.float32
    resumed = {name: Parameter(p.detach().clone()) for name, p in params.items()}
    other = kernel.Muon(resumed.items())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take_steps(optimizer, params, [2, 3])
    take_steps(other, resumed, [2, 3])
    assert same_bits(params, resumed)


@pytest.mark.parametrize("fallback", ["adamw", "nadamw"])
def test_float16_embeddings_move_as_float32_ones_do_and_are_rounded(kernel, fallback):
    """float16 holds neither the squares of small gradients nor those of large ones, so the averages are float32.

    Rows without a gradient in a step, as tokens that a batch does not have, would else be divided by a root of zero.
    """
    generator = torch.Generator().manual_seed(0)
    half = Parameter(torch.randn(50, 16, generator=generator).half())
    single = Parameter(half.detach().float())
    groups = ([{"params": [p], "use_muon": False}] for p in (half, single))
    optimizers = [kernel.Muon(group, lr=0.02, fallback=fallback) for group in groups]
    for size in (1e-4, 0.0, 2000.0, 1.0, 1e-3, 0.0):
        gradient = (size * torch.randn(50, 16, generator=generator)).half()
        half.grad, single.grad = gradient, gradient.float()
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(half, single.half()) and half.isfinite().all()
        with torch.no_grad():
            single.copy_(half)


def test_stochastic_rounding_that_is_switched_counts_from_the_next_step(kernel):
    """In a group of an optimizer that is already made, as in a new optimizer with the state of the old one."""
    params, others = (named_parameters(torch.bfloat16) for _ in range(2))
    changing, saved = kernel.Muon(params.items(), lr=0.02), None
    for seed, rounds in enumerate([False, True, False]):
        fresh = kernel.Muon(others.items(), lr=0.02)
        if saved is not None:
            fresh.load_state_dict(saved)
        for group in (*changing.param_groups, *fresh.param_groups):
            group["stochastic_rounding"] = rounds
        take_steps(changing, params, [seed])
        take_steps(fresh, others, [seed])
        saved = fresh.state_dict()
    assert same_bits(params, others)


def test_each_matrix_of_each_step_has_a_seed_of_its_own(kernel):
    """The first 2**20 matrices of a parameter have; a seed is an int64."""
    seed = kernel.step.local_matrix.LocalMatrix.seed

    def of(step, index, first):
        parameter = SimpleNamespace(group=1, seed=first)
        part = SimpleNamespace(matrix=SimpleNamespace(parameter=parameter, index=index))
        return seed(part, [{"rounding_step": 0}, {"rounding_step": step}])

    for first in (0, 2**63 - 1):
        seeds = [of(step, index, first) for step in (0, 1, 2**10, 2**40) for index in (0, 1, 2**10, 2**20 - 1)]
        assert len(set(seeds)) == len(seeds) and 0 <= min(seeds) and max(seeds) < 2**63
