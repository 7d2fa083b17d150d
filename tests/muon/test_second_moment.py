"""Second moments as a state: of which shape, when they change and when they do not, through files and settings."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import Tensor, nn

from tests.support.inside import plan_of
from tests.support.small_model import named_parameters, same_bits, set_gradients, take_steps

KEY = "second_moment"
# Of each kind of parameter its settings, and the shapes of its second moments of rows and of the long side.
KINDS = {
    "wide": ((8, 20), {}, (8, 1), (1, 20)),
    "tall": ((20, 8), {}, (20, 1), (20, 1)),
    "square": ((8, 8), {}, (8, 1), (8, 1)),
    "transposed": ((20, 8), {"transposed": True}, (1, 8), (20, 1)),
    "stack": ((3, 8, 20), {"stacked": True}, (3, 8, 1), (3, 1, 20)),
    "transposed stack": ((3, 8, 20), {"stacked": True, "transposed": True}, (3, 1, 20), (3, 1, 20)),
    "flattened": ((8, 6, 3, 3), {}, (8, 1, 1, 1), (1, 6, 3, 3)),
    "batched": ((8, 12, 3, 3), {"conv_mode": "batched"}, (8, 1, 3, 3), (1, 12, 3, 3)),
    "heads": ((24, 8), {"split_rows": (8, 16)}, (24, 1), (24, 1)),
}


def made(kernel, p: Tensor, **settings):
    """Return an optimizer of one parameter, which is Muon's whatever its shape."""
    group = {"params": [("blocks.0.weight", p)], "use_muon": True, "stacked": False, **settings}
    return kernel.Muon([group], lr=0.02)


def gradient(shape, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", ["rows", "long_side"])
def test_moments_are_of_the_lines_of_each_matrix(kernel, kind, by, dtype):
    """Zero at first; after a step all lines of a matrix have 1 - beta of the mean squares of their polar factor."""
    shape, settings, *sizes = KINDS[kind]
    p = nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizer = made(kernel, p, second_moment=by, second_moment_beta=0.75, **settings)
    moments = optimizer.state[p][KEY]
    assert moments.shape == sizes[by == "long_side"] and not moments.any()
    assert moments.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    p.grad = gradient(shape, 1).to(dtype)
    optimizer.step()
    # The squares of a polar factor sum to its shorter side, but for what five steps of an iteration leave.
    squares = sum(min(matrix.rows, matrix.cols) for matrix in plan_of(optimizer).matrices[0])
    assert moments.sum().item() * math.prod(shape) / moments.numel() == pytest.approx(0.25 * squares, rel=0.35)
    assert (moments > 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", ["rows", "long_side"])
def test_each_matrix_is_balanced_as_if_it_were_alone(kernel, kind, by):
    """Bit for bit, parameters and moments, over three steps."""
    shape, settings, *_ = KINDS[kind]
    p = nn.Parameter(gradient(shape, 0))
    optimizer = made(kernel, p, second_moment=by, **settings)
    parameter = plan_of(optimizer).matrices[0][0].parameter
    view = parameter.view
    alone = [nn.Parameter(M.clone()) for M in view.matrices(p.detach())]
    groups = [{"params": [(f"{i}.weight", q)], "use_muon": True} for i, q in enumerate(alone)]
    scale = view.scale  # of the steps of a kernel's positions
    others = kernel.Muon(
        groups,
        lr=0.02,
        second_moment=by,
        adjust_lr_fn=lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)) * scale,
    )
    for step in range(1, 4):
        p.grad = gradient(shape, step)
        for q, M in zip(alone, view.matrices(p.grad)):
            q.grad = M.clone()
        optimizer.step()
        others.step()
    moments = parameter.moments_view.matrices(optimizer.state[p][KEY])
    for q, M, v in zip(alone, view.matrices(p.detach()), moments):
        assert torch.equal(q, M) and torch.equal(others.state[q][KEY], v)


def test_channels_last_moments_are_those_of_their_columns(kernel):
    """A convolution in another order in memory has its columns in another order, and so are its moments."""
    p = nn.Parameter(torch.zeros(8, 6, 3, 3))
    q = nn.Parameter(torch.zeros(8, 6, 3, 3).to(memory_format=torch.channels_last))
    ends = []
    for w in p, q:
        optimizer = made(kernel, w, second_moment="long_side", ns_dtype="float32")
        for step in range(3):
            w.grad = gradient(w.shape, step).to(memory_format=torch.preserve_format)
            optimizer.step()
        ends.append((optimizer, optimizer.state[w][KEY]))
    torch.testing.assert_close(ends[1][1], ends[0][1], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(q, p, rtol=1e-3, atol=1e-5)
    ends[1][0].load_state_dict(ends[0][0].state_dict())  # which was saved in the other order
    q.grad = gradient(q.shape, 3)
    ends[1][0].step()


@pytest.mark.parametrize("by", ["rows", "long_side"])
def test_run_resumed_from_a_file_continues_bit_for_bit(kernel, by):
    params = named_parameters(torch.bfloat16)
    optimizer = kernel.Muon(params.items(), lr=0.02, second_moment=by, second_moment_beta=0.8)
    take_steps(optimizer, params, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = {name: nn.Parameter(p.detach().clone()) for name, p in params.items()}
    other = kernel.Muon(resumed.items())  # the file says what its state is
    other.load_state_dict(torch.load(file, weights_only=True))
    copied, copies = copy.deepcopy((optimizer, params))
    for each, parameters in (optimizer, params), (other, resumed), (copied, copies):
        take_steps(each, parameters, range(3, 6))
    assert same_bits(params, resumed) and same_bits(params, copies)
    moments = [optimizer.state[p][KEY] for p in params.values() if KEY in optimizer.state[p]]
    others = [other.state[p][KEY] for p in resumed.values() if KEY in other.state[p]]
    assert len(moments) == 2 and all(map(torch.equal, moments, others))
    assert {v.dtype for v in others} == {torch.float32}


def test_missing_gradients_and_overflow_leave_moments_alone(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), second_moment="rows")
    take_steps(optimizer, params, [0])
    before = {name: optimizer.state[params[name]][KEY].clone() for name in ("up.weight", "down.weight")}
    set_gradients(params, 1, without=("up.weight",))
    optimizer.step()
    assert torch.equal(optimizer.state[params["up.weight"]][KEY], before["up.weight"])
    moved = optimizer.state[params["down.weight"]][KEY]
    assert not torch.equal(moved, before["down.weight"])
    before = {name: optimizer.state[params[name]][KEY].clone() for name in before}
    set_gradients(params, 2)
    params["down.weight"].grad[0, 0] = math.inf
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)
    optimizer.step()
    assert all(torch.equal(optimizer.state[params[name]][KEY], v) for name, v in before.items())


def test_moments_come_and_go_with_the_setting(kernel):
    """Asked for later they begin at zero; those that nobody asks for any more are let go, and files have none."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    plain = copy.deepcopy(optimizer.state_dict())
    for group in optimizer.param_groups:
        group[KEY] = "rows"
    take_steps(optimizer, params, [0])
    assert optimizer.state[params["up.weight"]][KEY].all()
    lacking = copy.deepcopy(plain)
    for group in lacking["param_groups"]:
        del group[KEY]  # as in files from before the setting: it stays as it is here
    with pytest.raises(ValueError, match="needs the state momentum_buffer, second_moment, got momentum_buffer"):
        optimizer.load_state_dict(lacking)
    for group in optimizer.param_groups:
        group[KEY] = "long_side"
    words = r"second_moment of down.weight has shape \(12, 1\), needs \(1, 24\).* del optimizer.state\[p\]\['sec"
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    momentum = optimizer.state[params["down.weight"]]["momentum_buffer"]
    del optimizer.state[params["down.weight"]][KEY]
    take_steps(optimizer, params, [2])
    assert optimizer.state[params["down.weight"]][KEY].shape == (1, 24)
    assert optimizer.state[params["down.weight"]]["momentum_buffer"] is momentum
    for group in optimizer.param_groups:
        group[KEY] = "none"
    take_steps(optimizer, params, [1])
    assert KEY not in optimizer.state[params["up.weight"]]
    optimizer.load_state_dict(plain)


def test_moments_of_another_shape_are_not_loaded(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), second_moment="rows")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0][KEY] = torch.zeros(1, 12)
    with pytest.raises(ValueError, match=r"second_moment of up.weight has shape \(1, 12\), needs \(24, 1\)"):
        optimizer.load_state_dict(saved)


def test_columns_of_parts_are_refused(kernel):
    p = nn.Parameter(torch.zeros(24, 16))
    words = r"long_side' of blocks.0.weight, 24x16 split 8\+16, needs one number per column.*write second_moment='rows'"
    with pytest.raises(ValueError, match=words):
        made(kernel, p, second_moment="long_side", split_rows=(8, 16))


def test_settings_must_be_known(kernel):
    params = [("w", nn.Parameter(torch.ones(8, 20)))]
    with pytest.raises(ValueError, match="second_moment must be one of none, rows, long_side, got 'short'"):
        kernel.Muon(params, second_moment="short")
    with pytest.raises(ValueError, match=r"second_moment_beta must be at least 0 and below 1\.0"):
        kernel.Muon(params, second_moment_beta=1.0)


def test_what_is_done_is_explained(kernel):
    params = [("tall", nn.Parameter(torch.ones(20, 8))), ("wide", nn.Parameter(torch.ones(8, 20)))]
    rows = kernel.Muon(params, second_moment="long_side", renormalize="frobenius").explain().rows
    assert rows[0].kernel.endswith(", renormalized by frobenius, rows balanced by second moments")
    assert rows[1].kernel.endswith(", columns balanced by second moments")


def test_groups_that_differ_share_no_batch_and_beta_is_read_at_every_step(kernel):
    """Three matrices of one shape: each gets what it gets alone."""
    settings = {"second_moment": "rows"}, {}, {"second_moment": "rows", "second_moment_beta": 0.5}

    def updated(*settings: dict) -> list[Tensor]:
        groups = [
            {"params": [(f"{i}.weight", nn.Parameter(gradient((8, 20), 0)))], **s} for i, s in enumerate(settings)
        ]
        optimizer = kernel.Muon(groups)
        for step in range(2):
            for group in optimizer.param_groups:
                group["params"][0].grad = gradient((8, 20), step)
            optimizer.step()
        return [group["params"][0].detach() for group in optimizer.param_groups]

    together = updated(*settings)
    assert len({tuple(p.flatten().tolist()) for p in together}) == 3
    assert all(torch.equal(p, updated(s)[0]) for p, s in zip(together, settings))


def test_momentum_in_host_memory_changes_no_bit(kernel):
    here, there = named_parameters(), named_parameters()
    for params, offload in (here, False), (there, True):
        optimizer = kernel.Muon(params.items(), second_moment="long_side", offload=offload)
        take_steps(optimizer, params, range(3))
    assert same_bits(here, there)


def test_metrics_have_the_norm_of_balanced_updates(kernel):
    p = nn.Parameter(torch.zeros(12, 30))
    settings = {"second_moment": "rows", "ns_dtype": "float32"}  # whose roundings no norm shows
    optimizer = kernel.Muon([("up.weight", p)], lr=1.0, weight_decay=0.0, **settings)
    for step in range(2):
        before, p.grad = p.detach().clone(), gradient((12, 30), step)
        optimizer.step()
    torch.testing.assert_close(optimizer.metrics()["muon_update_norm"].float(), (p - before).norm())
