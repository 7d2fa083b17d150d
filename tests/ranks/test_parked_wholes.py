"""A state of wholes that is parked in host memory stays there when it is saved; a step cuts it."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from tests.support.ranks_on_device import DEVICE, on_modelled_device
from tests.support.sharded_models import LAYOUTS, Case, built, model, take_steps, wholes


def parked(kernel, case: Case) -> list[list[tuple[bool, str]]]:
    """Return of each state tensor whether it is sharded, and where it is: after a save, and after the next step."""
    seen = []
    with on_modelled_device(kernel):
        params, optimizer = built(kernel, case)
        take_steps(case, params, optimizer, [1])
        for state in optimizer.state.values():
            state.update(wholes(state))
        for act in (optimizer.state_dict, lambda: take_steps(case, params, optimizer, [2])):
            act()
            values = [value for state in optimizer.state.values() for value in state.values()]
            seen.append([(isinstance(value, DTensor), value.device.type) for value in values])
    return seen


def test_a_parked_whole_is_cut_when_it_is_brought_back(pools):
    case = Case(model(LAYOUTS["rows"], seed=2), {"lr": 0.02, "second_moment": "rows"})
    for saved, stepped in pools(4).run(parked, case):
        assert set(saved) == {(False, "cpu")} and set(stepped) == {(True, torch.device(DEVICE).type)}
