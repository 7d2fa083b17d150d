"""A step follows from parameters, settings and state alone: it does not matter what earlier steps were like."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.support.refusals import error_of
from tests.support.sharded_models import bits_equal
from tests.support.small_model import gradient_of

STEPS = 12
SHAPES = [(7,), (12, 20), (20, 12), (12, 20), (24, 16), (3, 64), (8, 4, 3, 3), (5, 8, 12), (2, 3, 8, 12)]
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float64]
NAMES = ["layers.{}.weight", "layers.{}.weight", "experts.{}", "wte.{}.weight"]
SETTINGS = {
    "lr": [0.0, 0.02, 0.5],
    "weight_decay": [0.0, 0.3],
    "momentum": [0.0, 0.9],
    "nesterov": [True, False],
    "maximize": [True, False],
    "eps": [1e-7, 1e-2],
    "ns_steps": [3, 5],
    "ns_coefficients": ["quintic", "polar_express_safer"],
    "ns_dtype": ["float32", "bfloat16"],
    "ns_method": ["auto", "standard", "gram"],
    "adjust_lr_fn": ["original", "match_rms_adamw", None],
    "equalize": ["none", "rows"],
    "renormalize": ["none", "frobenius"],
    "second_moment": ["none", "rows", "long_side"],
    "second_moment_beta": [0.5, 0.95],
    "experimental_hyperball": [True, False],
    "decay_mode": ["decoupled", "independent", "cautious"],
    "conv_mode": ["flatten", "batched"],
    "split_rows": [None, (4, 8)],
    "stacked": [None, True],
    "fallback": ["adamw", "nadamw"],
    "adamw_betas": [(0.9, 0.95), (0.5, 0.9)],
    "adamw_eps": [1e-8, 1e-2],
    "master_weights": [None, "split"],
    "momentum_dtype": [None, "bfloat16", "int8"],
    "offload": [True, False],
    "use_muon": [True, False],
}
# What this package writes into groups for their readers.
NOT_SETTINGS = {"params", "param_names", "reason", "build", "state_format"}


def drawn_group(draw: random.Random) -> dict:
    """Return a group of parameters with names that no other group has."""
    first = draw.randrange(10**9)
    names = [draw.choice(NAMES).format(first + i) for i in range(draw.randint(1, 4))]
    values = (torch.randn(draw.choice(SHAPES)).to(draw.choice(DTYPES)) for _ in names)
    return {"params": [(name, nn.Parameter(value)) for name, value in zip(names, values)]}


def change_settings(draw, optimizer, group, place):
    for key in draw.sample(list(SETTINGS), draw.choice([1, 1, 4])):
        group[key] = draw.choice(SETTINGS[key])


def freeze_or_thaw(draw, optimizer, group, place):
    p = group["params"][place]
    p.requires_grad_(not p.requires_grad)


def add_group(draw, optimizer, group, place):
    optimizer.add_param_group(drawn_group(draw))


def leave_out(draw, optimizer, group, place):
    for key in ("params", "param_names"):
        del group[key][place]


def reorder(draw, optimizer, group, place):
    for key in ("params", "param_names"):
        group[key][:] = group[key][place:] + group[key][:place]


def lose_state(draw, optimizer, group, place):
    optimizer.state.pop(group["params"][place], None)


def replace_state(draw, optimizer, group, place):
    state = optimizer.state[group["params"][place]]
    state.update({key: value.clone() for key, value in state.items()})


def put_state_last(draw, optimizer, group, place):
    p = group["params"][place]
    optimizer.state[p] = optimizer.state.pop(p, {})


def move_in_memory(draw, optimizer, group, place):
    p = group["params"][place]
    p.grad = None
    p.data = p.data.clone() if p.ndim < 2 else p.data.mT.contiguous().mT


def replace_parameter(draw, optimizer, group, place):
    p = group["params"][place]
    q = group["params"][place] = nn.Parameter(p.detach().clone(), p.requires_grad)
    if p in optimizer.state:
        optimizer.state[q] = optimizer.state.pop(p)


def load(draw, optimizer, group, place):
    optimizer.load_state_dict(optimizer.state_dict())


OTHER_CHANGES: list[Callable] = [
    freeze_or_thaw,
    add_group,
    leave_out,
    reorder,
    lose_state,
    replace_state,
    put_state_last,
    move_in_memory,
    replace_parameter,
    load,
]


def change_something(draw: random.Random, optimizer) -> None:
    """Change settings, or something else, of a group that has parameters; sometimes nothing."""
    groups = [group for group in optimizer.param_groups if group["params"]]
    act = draw.choice([change_settings] * 6 + [draw.choice(OTHER_CHANGES)] * 3 + [lambda *_: None])
    if groups:
        group = draw.choice(groups)
        act(draw, optimizer, group, draw.randrange(len(group["params"])))


def newcomer(kernel, optimizer, state_dict):
    """Return an optimizer that was made just now for copies of the parameters, and has loaded this state of them."""
    grouped = []
    for group in optimizer.param_groups:
        copies = [nn.Parameter(copy.deepcopy(p.detach()), p.requires_grad) for p in group["params"]]
        settings = {key: copy.deepcopy(value) for key, value in group.items() if key not in NOT_SETTINGS}
        grouped.append({"params": list(zip(group["param_names"], copies)), **settings})
    new = kernel.Muon(grouped)
    new.load_state_dict(state_dict)
    return new


def step(optimizer, number: int) -> list[torch.Tensor]:
    """Take a step, in which some parameters have no gradient; return all parameters and states."""
    named = [pair for group in optimizer.param_groups for pair in zip(group["param_names"], group["params"])]
    for place, (name, p) in enumerate(named):
        p.grad = None if (number + place) % 5 == 0 else gradient_of(name, p, number)
    optimizer.step()
    return [x for _, p in named for x in (p, *(x for _, x in sorted(optimizer.state.get(p, {}).items())))]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_step_is_that_of_an_optimizer_that_was_made_just_now(kernel, seed):
    """Whatever was changed before it: settings, parameters, their order, memory and state, or nothing.

    A change that does not go with the rest is refused by a state dict as by a step, and taken back: then the state is
    that of before the change.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)
    optimizer = kernel.Muon([drawn_group(draw) for _ in range(2)], lr=0.02)
    for number in range(STEPS):
        before = copy.deepcopy([{**group, "params": None} for group in optimizer.param_groups])
        state = copy.deepcopy(optimizer.state_dict())
        change_something(draw, optimizer)
        refused = error_of(optimizer.state_dict)
        if refused is not None:
            assert error_of(optimizer.step) == refused
            for group, settings in zip(optimizer.param_groups, before):
                group.update(settings, params=group["params"])
        else:
            state = copy.deepcopy(optimizer.state_dict())
        new = newcomer(kernel, optimizer, state)
        pairs = zip(step(optimizer, number), step(new, number), strict=True)
        assert all(bits_equal(a, b) for a, b in pairs)
