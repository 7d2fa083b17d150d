"""Ranks whose tensors are on a device: no message starts from the CPU, and the host waits for nothing.

Everything else is as on the CPU: the bits are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks.test_gram_sums import SUMMED, assert_close
from tests.ranks.test_teams import FOUR, TEAMS, long_ones, teams_cost_nothing
from tests.support import sharded_models
from tests.support.backends import read_last_step
from tests.support.inside import plan_of
from tests.support.pieces import put_together
from tests.support.ranks_on_device import DEVICE, on_modelled_device, train_on_device
from tests.support.sharded_models import (
    LAYOUTS,
    Case,
    Spec,
    assert_same,
    bits_equal,
    model,
    muon,
    part_of,
    train_alone,
    whole,
    whole_gradient,
)

HALF: dict[str, Any] = {"dtype": torch.bfloat16}
RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "second moments": ({"second_moment": "rows"}, {}),
    "kept norms": ({"experimental_hyperball": True, "second_moment": "rows"}, {}),
    "released gradients": ({"release_grads": True}, {}),
    "equalized": ({"equalize": "rows", "renormalize": "columns_rows"}, {}),
    "cautious": ({"decay_mode": "cautious"}, {}),
    "split masters": ({"master_weights": "split"}, HALF),
    "rounded stochastically": ({"stochastic_rounding": True}, HALF),
    "momentum in bfloat16": ({"momentum_dtype": "bfloat16"}, {}),
}


def assert_as_alone(kernel, pools, case: Case) -> None:
    """Parameters and state on each of four ranks have the bits of one process, with the same functions of torch."""
    results = put_together(pools(4).run(train_on_device, case))
    with on_modelled_device(kernel):
        alone = train_alone(kernel, case, results[0].holders, DEVICE)
    for result in results:
        assert_same(case, result, alone)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_gives_the_bits_of_one_process(kernel, pools, layout):
    settings = {"chunk_bytes": 1000, "lr": 0.02}
    assert_as_alone(kernel, pools, Case(model(layout, seed=4), settings, steps=3, missing="here and there"))


@pytest.mark.parametrize("settings, changes", RECIPES.values(), ids=RECIPES)
def test_every_recipe_gives_the_bits_of_one_process(kernel, pools, settings, changes):
    specs = (*model(LAYOUTS["hsdp"], seed=5), Spec("norm.weight", (33,), LAYOUTS["hsdp"]))
    assert_as_alone(kernel, pools, Case(specs, {"lr": 0.02, **settings}, steps=3, missing="everywhere", **changes))


def test_copies_share_the_work(kernel, pools):
    large = tuple(Spec(f"layers.{i}.up.weight", (384, 400)) for i in range(10, 13))  # worth sending (test_step.py)
    specs = (*large, *model(None, seed=6)[:4], Spec("norm.weight", (33,)))
    case = Case(specs, {"lr": 0.02, "ns_steps": 2}, steps=3, missing="everywhere", shared=True)
    assert_as_alone(kernel, pools, case)
    assert pools(4).run(exchanges, case) == [1] * 4


def exchanges(kernel, case: Case) -> int:
    """How many sets of ranks send matrices to each other."""
    with on_modelled_device(kernel):
        params = [part_of(case, i) for i in range(len(case.specs))]
        return len(plan_of(muon(kernel, case, params, process_group=dist.group.WORLD)).exchanges)


def assert_close_to_alone(kernel, pools, case: Case, job) -> None:
    results = put_together(pools(4).run(job, case))
    with on_modelled_device(kernel):
        assert_close(kernel, case, results, train_alone(kernel, case, results[0].holders, DEVICE))


def test_summed_matrices_end_as_in_one_process_up_to_rounding(kernel, pools):
    """Also matrices of one size of which a rank has parts of other sizes: they share no batch."""
    layouts = ("columns", "columns", "strided columns", "columns")
    specs = tuple(Spec(f"layers.{i}.up.weight", (6, 402), LAYOUTS[name]) for i, name in enumerate(layouts))
    case = Case(specs, {"lr": 0.02, **SUMMED}, steps=3, missing="here and there")
    assert_close_to_alone(kernel, pools, case, train_on_device)


def train_in_teams_on_device(kernel, case: Case):
    with teams_cost_nothing(kernel):
        return train_on_device(kernel, case)


def test_teams_end_as_one_process_up_to_rounding(kernel, pools):
    assert_close_to_alone(kernel, pools, Case(long_ones(FOUR), TEAMS, steps=3), train_in_teams_on_device)


SPECS = (*model(LAYOUTS["hsdp"], seed=7)[:4], Spec("norm.weight", (33,), LAYOUTS["hsdp"]))


class Run:
    """A run on the device, whose steps a job takes one by one."""

    def __init__(self, kernel, case: Case):
        self._case = case
        self.params = [part_of(case, i) for i in range(len(case.specs))]
        self.optimizer = muon(kernel, case, self.params)
        self._steps = 0

    def step(self, without: int | None = None) -> None:
        """Take a step; the parameter `without` has no gradient."""
        self._steps += 1
        for i, (spec, p) in enumerate(zip(self._case.specs, self.params)):
            gradient = sharded_models.sharded(whole_gradient(self._case, self._steps, i), spec.layout).data
            p.grad = None if i == without else gradient
        self.optimizer.step()

    def wholes(self) -> list[torch.Tensor]:
        return list(map(whole, self.params))


def waits_of_steps(kernel, case: Case) -> list[int]:
    """How often the host waited for the device in each of four steps, of which the last two have another rate."""
    waits = []
    with on_modelled_device(kernel) as narrow:
        run = Run(kernel, case)
        for step in range(4):
            if step == 2:
                run.optimizer.param_groups[0]["lr"] = 0.01
            before = narrow.waits
            run.step()
            waits.append(narrow.waits - before)
    return waits


@pytest.mark.parametrize("missing", ["nowhere", "everywhere"])
def test_only_the_first_step_waits_for_the_device(pools, missing):
    for first, *later in pools(4).run(waits_of_steps, Case(SPECS, missing=missing)):
        assert first > 0 and later == [0, 0, 0]


def step_otherwise(kernel, case: Case, what: str):
    """In the second step rank 3 does something else; return the error of the third, and whether the second moved."""
    with on_modelled_device(kernel):
        run, odd = Run(kernel, case), dist.get_rank() == 3
        run.step()
        before = run.wholes()
        if what == "another rate" and odd:
            run.optimizer.param_groups[0]["lr"] = 0.5
        if what == "another scale":
            run.optimizer.grad_scale = torch.full((), 4.0 if odd else 2.0, device=DEVICE)
            run.optimizer.found_inf = torch.zeros(1, device=DEVICE)
        run.step(without=0 if what == "a missing gradient" and odd else None)
        if what == "another scale":
            run.optimizer.grad_scale.fill_(1.0)  # as a scaler's update does in place: the error has the step's scales
        vars(run.optimizer).pop("grad_scale", None)
        vars(run.optimizer).pop("found_inf", None)
        same = list(map(bits_equal, run.wholes(), before))
        return error_of(run.step), same


WORDS = {
    "another rate": "rank 3 had 'lr': 0.5",
    "another scale": "rank 0 had 2.0, rank 3 had 4.0; give all scalers one scale",
    "a missing gradient": "had a gradient and ranks",
}


@pytest.mark.parametrize("what", WORDS)
def test_a_step_that_ranks_took_otherwise_changes_nothing_and_the_next_one_raises(pools, what):
    for error, same in pools(4).run(step_otherwise, Case(SPECS, {"lr": 0.02}), what):
        assert WORDS[what] in error and "nothing that they share was changed" in error
        assert all(same)


def swap_once(kernel, case: Case, leaves_out: bool):
    """In the second of four turns rank 3 takes the steps of two optimizers in another order, or leaves the first out.

    Returns the errors of each turn, and the turns in which parameters moved.
    """
    with on_modelled_device(kernel):
        runs, errors, moved = [Run(kernel, case), Run(kernel, case)], [], []
        for turn in range(4):
            is_odd, before = turn == 1 and dist.get_rank() == 3, runs[0].wholes()
            order = runs[::-1] if is_odd else runs
            acts = [run.step for run in order]
            if is_odd and leaves_out:  # then it reads what the others' second steps read
                acts[1] = partial(read_last_step, runs[0].optimizer)
            errors.append(list(filter(None, map(error_of, acts))))
            moved.append(not all(map(bits_equal, before, runs[0].wholes())))
        return errors, moved


def error_of(act: Callable[[], object]) -> str:
    """Return what `act` raises, as text; nothing if it raises nothing."""
    try:
        act()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("leaves_out", [False, True], ids=["swapped", "left out"])
def test_optimizers_in_one_order_again_go_on(pools, leaves_out):
    for errors, moved in pools(4).run(swap_once, Case(SPECS, {"lr": 0.02}), leaves_out):
        assert errors[0] == errors[2] == errors[3] == []
        (error,) = errors[1]
        assert "ranks do not do the same" in error
        assert moved == [True, False, True, True]


def overflow_somewhere(kernel, case: Case) -> list[bool]:
    """Rank 1 alone finds that gradients overflow."""
    with on_modelled_device(kernel):
        run = Run(kernel, case)
        run.step()
        before = run.wholes()
        run.optimizer.grad_scale = torch.full((), 2.0, device=DEVICE)
        run.optimizer.found_inf = torch.full((1,), float(dist.get_rank() == 1), device=DEVICE)
        run.step()
        return list(map(bits_equal, run.wholes(), before))


def test_an_overflow_on_one_rank_skips_the_step_on_all(pools):
    assert all(all(same) for same in pools(4).run(overflow_somewhere, Case(SPECS, {"lr": 0.02})))


def copies_are_compared(kernel, case: Case) -> list[str]:
    """The errors of `check_copies` before and after rank 3 has changed an element."""
    with on_modelled_device(kernel):
        run = Run(kernel, case)
        run.step()
        before = error_of(run.optimizer.check_copies)
        if dist.get_rank() == 3:
            run.params[1].data._local_tensor.add_(1.0)
        return [before, error_of(run.optimizer.check_copies)]


def test_copies_on_a_device_are_compared_there(pools):
    for before, after in pools(4).run(copies_are_compared, Case(SPECS)):
        assert before == ""
        assert "layers.1.up.weight differs between ranks [1] and [3]" in after
