"""Settings of an exchange that cannot be, and those in which ranks differ, raise."""

from __future__ import annotations

import inspect
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor


def terms_of_three(kernel, kernels="failed here: nothing"):
    """Terms of a, b and c, each in a group of its own, with what `Terms.settings` reads."""
    terms = kernel.plan.terms.Terms
    unused = dict.fromkeys(terms._fields)
    return terms(
        **{**unused, "kernels": kernels, "names": ("a", "b", "c"), "group_positions": ((0, 0), (1, 0), (2, 0))}
    )


def described(kernel, one, other, failed=("failed here: nothing",) * 2):
    """What an error says of ranks 0 and 2 whose groups have the settings `one` and `other`, one dict for each group."""
    plain = kernel.Muon([("w", nn.Parameter(torch.ones(8, 8)))], lr=0.1).param_groups[0]
    texts = [
        terms_of_three(kernel, line).settings([{**plain, **each} for each in groups])
        for line, groups in zip(failed, (one, other))
    ]
    return kernel.step.agreement.differences.difference_of_settings(terms_of_three(kernel), {0: texts[0], 2: texts[1]})


def test_the_error_names_all_parameters_with_the_first_difference_and_nothing_else(kernel):
    decays = [{"weight_decay": 0.1}, {"weight_decay": 0.0}, {"weight_decay": 0.0}]
    moved = [{**each, "lr": 0.2} for each in decays]
    words = "ranks had different settings for {}: rank 0 had 'lr': 0.1, rank 2 had 'lr': 0.2"
    assert described(kernel, decays, moved) == words.format("a, b, c")
    assert described(kernel, decays, [decays[0], *moved[1:]]) == words.format("b, c")
    assert described(kernel, decays, [moved[0], decays[1], {**decays[2], "momentum": 0.5}]) == words.format("a")


def test_the_error_tells_a_number_from_one_in_a_tensor_on_a_device(kernel):
    elsewhere = {"lr": torch.zeros((), device="meta"), "weight_decay": 0.2}
    assert described(kernel, [{}] * 3, [elsewhere] * 3).endswith(
        "rank 0 had 'lr': 0.1, 'weight_decay': 0.1, rank 2 had 'weight_decay': 0.2, 'lr': in a tensor on its device"
    )


def test_the_error_tells_kernels_that_failed_from_settings(kernel):
    failed = "failed here: nothing", "failed here: gemm"
    assert described(kernel, [{}] * 3, [{}] * 3, failed) == (
        "ranks do not have the same kernels for a, b, c: rank 0 has failed here: nothing, rank 2 has failed here: gemm"
    )


def test_ranks_meet_by_the_device_of_a_parameter_that_is_on_one(kernel):
    """NCCL sends nothing from a CPU, where the first parameter may be, as with offloaded embeddings."""
    terms = kernel.plan.terms
    layout = kernel.plan.layout.Layout((8,), kernel.plan.layout.mesh_of((1,), (0,)), (None,))
    rest = {"line": "", "group_positions": (0, 0), "layout": layout, "is_empty": False, "is_local_shard": False}
    shared = [terms._Shared(name=kind, device=torch.device(kind, 0), **rest) for kind in ("cpu", "cuda")]
    assert terms._terms((0,), "", "", shared).device == torch.device("cuda", 0)


@pytest.mark.parametrize("key", ["chunk_bytes", "chunks_in_flight", "ranks_per_matrix"])
@pytest.mark.parametrize("value, error", [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_impossible_chunk_settings_raise(kernel, key, value, error):
    with pytest.raises(error, match=f"{key} must be .*{value}"):
        kernel.ExchangeOptions(**{key: value})


@pytest.mark.parametrize("key", ["chunks_in_flight", "ranks_per_matrix"])
def test_only_the_bytes_of_a_chunk_are_chosen_for_none(kernel, key):
    assert kernel.ExchangeOptions(chunk_bytes=None) == kernel.ExchangeOptions()
    with pytest.raises(TypeError, match=f"{key} must be a whole number, got None"):
        kernel.ExchangeOptions(**{key: None})


def test_whole_numbers_of_numpy_are_numbers(kernel):
    """In print, too, which ranks compare."""
    plain, wide = (kernel.ExchangeOptions(chunk_bytes=of(4096), ranks_per_matrix=of(2)) for of in (int, np.int64))
    assert repr(plain) == repr(wide)


def test_a_number_for_a_flag_raises(kernel):
    with pytest.raises(TypeError, match="sum_gram must be True or False, got 1"):
        kernel.ExchangeOptions(sum_gram=1)


def error_of_unsorted_group(kernel):
    group = dist.new_group([1, 0], sort_ranks=False)
    with pytest.raises(ValueError, match="ascending order"):
        kernel.Muon([nn.Parameter(torch.ones(4, 4))], exchange=kernel.ExchangeOptions(process_group=group))


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="this torch has groups in order alone"
)
def test_process_group_in_another_order_raises(pools):
    pools(2).run(error_of_unsorted_group)


def error_of_a_capture_after_loading(kernel):
    """Loading forgets the plan, which is made again before a step is judged."""
    p = nn.Parameter(torch.ones(4, 4))
    exchange = kernel.ExchangeOptions(process_group=dist.group.WORLD)
    optimizer = kernel.Muon([("up.weight", p)], exchange=exchange, capturable=True)
    p.grad = torch.ones(4, 4)
    optimizer.load_state_dict(optimizer.state_dict())
    capturing = mock.patch.multiple(torch.cuda, is_initialized=lambda: True, is_current_stream_capturing=lambda: True)
    with capturing, pytest.raises(RuntimeError, match="several ranks share"):
        optimizer.step()


def test_a_step_of_shared_parameters_is_never_captured(pools):
    pools(2).run(error_of_a_capture_after_loading)


def warned_of(kernel, exchange) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel.Muon([("up.weight", nn.Parameter(torch.ones(4, 4)))], exchange=exchange)
        kernel.compat.Muon(kernel.compat.get_default_muon_param_groups(nn.Linear(4, 4)))  # chooses for its users
    return [str(each.message) for each in caught if "exchange" in str(each.message)]


def test_options_that_change_nothing_among_ranks_are_a_warning(kernel, pools):
    """As those of a group that was read before there were any."""
    assert all("init_process_group" in line for (line,) in pools(2).run(warned_of, kernel.ExchangeOptions()))
    assert pools(2).run(warned_of, kernel.ExchangeOptions(chunk_bytes=1000)) == [[], []]
    assert pools(2).run(warned_of, None) == [[], []]
    assert warned_of(kernel, kernel.ExchangeOptions()) == []


def warned_of_by_first_steps(kernel, exchange) -> list[list[str]]:
    """Return what each of two steps says of options that were made, like the optimizer, before there were ranks."""
    p = nn.Parameter(torch.ones(4, 4))
    with mock.patch.object(kernel.plan.exchange_options, "world_size", lambda: 1):
        optimizer = kernel.Muon([("up.weight", p)], exchange=exchange)
    said = []
    for _ in range(2):
        p.grad = torch.ones(4, 4)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        said.append([str(each.message) for each in caught])
    return said


def test_the_first_step_warns_of_them_where_ranks_came_later(kernel, pools):
    for first, second in pools(2).run(warned_of_by_first_steps, kernel.ExchangeOptions()):
        assert ["init_process_group" in line for line in first] == [True]
        assert second == []
    assert pools(2).run(warned_of_by_first_steps, kernel.ExchangeOptions(chunk_bytes=1000)) == [[[], []], [[], []]]
    assert pools(2).run(warned_of_by_first_steps, None) == [[[], []], [[], []]]


def step_with_rates(kernel, rates: list[list[float]]):
    """Return the error of a second step in which each group has its rank's rate, and whether parameters stayed."""
    params = [nn.Parameter(torch.ones(8, 8)) for _ in rates[0]]
    groups = [{"params": [(f"layers.{i}.up.weight", p)], "lr": 0.1} for i, p in enumerate(params)]
    optimizer = kernel.Muon(groups, exchange=kernel.ExchangeOptions(process_group=dist.group.WORLD))
    for p in params:
        p.grad = torch.ones(8, 8).tril()
    optimizer.step()
    before = [p.detach().clone() for p in params]
    for group, rate in zip(optimizer.param_groups, rates[dist.get_rank()]):
        group["lr"] = rate
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error), all(map(torch.equal, params, before))
    return "", False


def test_ranks_with_the_same_rates_for_other_layers_disagree(pools):
    """As where one rank thaws a layer a step earlier than the others."""
    for text, stayed in pools(2).run(step_with_rates, [[0.1, 0.0, 0.0], [0.1, 0.1, 0.0]]):
        assert stayed and "layers.1.up.weight" in text and "0.1" in text
    assert pools(2).run(step_with_rates, [[0.1, 0.0, 0.0]] * 2) == [("", False)] * 2


def refused_rates(kernel, key: str) -> bool:
    """Give a DTensor to the constructor, then to a group; return whether parameter and momentum stay."""
    number = distribute_tensor(torch.tensor(0.1), DeviceMesh("cpu", [0, 1]), [Replicate()])
    p = nn.Parameter(torch.ones(8, 8))
    with pytest.raises(TypeError, match=f"{key} must be a number or a plain tensor, got a DTensor: write"):
        kernel.Muon([("up.weight", p)], **{key: number})
    optimizer = kernel.Muon([("up.weight", p)])
    p.grad, optimizer.param_groups[0][key] = torch.ones(8, 8).tril(), number
    with pytest.raises(TypeError, match=f"{key} must be a number or a plain tensor, got a DTensor: write"):
        optimizer.step()
    return torch.equal(p, torch.ones(8, 8)) and not optimizer.state[p]["momentum_buffer"].any()


@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_a_rate_in_a_dtensor_is_refused_before_anything_changes(pools, key):
    assert pools(2).run(refused_rates, key) == [True, True]


# A value of each setting that a step reads anew, which no other has by default.
READ_AT_EVERY_STEP = {
    "momentum": 0.5,
    "nesterov": False,
    "eps": 1e-3,
    "second_moment_beta": 0.5,
    "decay_mode": "cautious",
    "decay_lr": 0.5,
    "maximize": True,
    "fallback": "nadamw",
    "lr_factor": 0.5,
    "adamw_betas": (0.5, 0.6),
    "adamw_eps": 1e-3,
    "stochastic_rounding": True,
    "rounding_step": 3,
}


def test_no_setting_is_left_out_below(kernel):
    """`lr` and `weight_decay` differ in the tests above."""
    assert {*READ_AT_EVERY_STEP, "lr", "weight_decay"} == {*kernel.parameters.settings.COMPARED_AT_EVERY_STEP}


@pytest.mark.parametrize("key", READ_AT_EVERY_STEP)
def test_ranks_compare_each_setting_that_a_step_reads(kernel, key):
    """Else the copies of parameters would part at the first step after one rank alone has changed it."""
    text = described(kernel, [{}] * 3, [{key: READ_AT_EVERY_STEP[key]}] * 3)
    assert text.startswith("ranks had different settings for a, b, c: ")
    assert text.endswith(f"rank 2 had {key!r}: {READ_AT_EVERY_STEP[key]!r}")
