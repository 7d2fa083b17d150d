"""NAdamW: timm's trajectories, the formula in plain numbers, and the traps that rules over tensor lists have."""

import importlib
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.trajectories import load_trajectories

SETTINGS = dict(lr=0.01, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1, maximize=False)


@pytest.fixture(scope="module")
def rules(kernel):
    return importlib.import_module(".rules.nadamw", kernel.__name__)


@pytest.fixture(scope="module")
def trajectories(kernel, repository):
    """timm's runs whose parameters that are no matrices are NAdamW's."""
    golden = load_trajectories(kernel, repository)
    return [each for each in golden if each.kind == "timm" and each.case["options"]["nesterov"]]


def rule(rules, **changes):
    return rules.FallbackRule(**{**SETTINGS, **changes})


class State(NamedTuple):
    """A parameter's averages of gradients and of their squares, and the count of its steps."""

    average: torch.Tensor
    square: torch.Tensor
    step: torch.Tensor


def take_step(rules, parameters, gradients, states, *settings):
    """Take one step of NAdamW in place."""
    columns = (list(column) for column in zip(*states))
    rules.nadamw_(rules.FallbackTensors(list(parameters), list(gradients), *columns), *settings)


def states_of(rules, parameters, steps=0):
    """States as an optimizer makes them."""
    return [State(torch.zeros_like(p), torch.zeros_like(p), torch.tensor(float(steps))) for p in parameters]


def example(rules, dtype=torch.float64, seed=0):
    """Parameters, gradients and states of three parameters that have taken 0, 2 and 1000 steps."""
    generator = torch.Generator().manual_seed(seed)
    draws = [
        [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((7,), (4, 6), (2, 3, 5))]
        for _ in range(4)
    ]
    parameters, gradients, averages, squares = ([t.to(dtype) for t in row] for row in draws)
    steps = [torch.tensor(float(count)) for count in (0, 2, 1000)]
    squares = [t.square() for t in squares]
    states = [State(*state) for state in zip(averages, squares, steps)]
    return parameters, gradients, states


def tensors(parameters, states):
    return [*parameters, *(t for state in states for t in state)]


def scalar_step(p, g, m, v, t, settings):
    """One element's step in Python's own numbers: the formula, written out."""
    (beta1, beta2), g = settings["betas"], -g if settings["maximize"] else g
    p = p * (1 - settings["lr"] * settings["weight_decay"])
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    ahead = (beta1 * m + (1 - beta1) * g) / (1 - beta1 ** (t + 1))
    return p - settings["lr"] * ahead / (math.sqrt(v / (1 - beta2 ** (t + 1))) + settings["eps"]), m, v


def test_float64_follows_timm(rules, trajectories):
    compared = 0
    for trajectory in trajectories:
        o, names = trajectory.case["options"], trajectory.case["adam_order"]
        settings = rule(rules, lr=o["adamw_lr"] or o["lr"], betas=o["betas"], eps=o.get("eps", 1e-7))
        settings = settings._replace(weight_decay=o["weight_decay"])
        starts = {name: trajectory.sequence(name, start=True).double() for name in names}
        gradients = {name: trajectory.sequence(name, start=False).double() for name in names}
        parameters = {name: start.clone() for name, start in starts.items()}
        states = dict(zip(names, states_of(rules, parameters.values())))
        for step in range(1, trajectory.steps + 1):
            moved = [name for name in names if step not in trajectory.none_grads.get(name, ())]
            chosen = [parameters[name] for name in moved], [gradients[name][step - 1] for name in moved]
            take_step(rules, *chosen, [states[name] for name in moved], settings)
            for name in names if step in (1, 2, 5, 12) else ():
                columns = (slice(None), slice(None, None, 64)) if name == "extreme" else ...
                reference, start = trajectory.expected(step)[name].double(), starts[name][columns]
                error = (parameters[name][columns] - reference).norm()
                assert error <= trajectory.case["tol_rel_float64"] * (reference - start).norm(), (name, step)
                compared += 1
        for key, index in (("exp_avg", 0), ("exp_avg_sq", 1)):
            stored = np.concatenate([states[name][index].flatten().numpy() for name in names if name != "extreme"])
            expected = trajectory.arrays[f"{trajectory.case['id']}/s12/{key}"][: stored.size]
            np.testing.assert_allclose(stored, expected, rtol=1e-12, atol=1e-12 * np.abs(expected).max())
    assert compared > 50


@pytest.mark.parametrize("maximize", [False, True])
def test_every_element_follows_the_formula(rules, maximize):
    settings = {**SETTINGS, "maximize": maximize}
    parameters, gradients, states = example(rules)
    expected = []
    for p, g, state in zip(parameters, gradients, states):
        numbers = zip(*(t.flatten().tolist() for t in (p, g, state.average, state.square)))
        expected.append([scalar_step(*element, state.step.item(), settings) for element in numbers])
    take_step(rules, parameters, gradients, states, rule(rules, maximize=maximize))
    for p, state, rows in zip(parameters, states, expected):
        # Some ten roundings, of 1.1e-16 of values below 10.
        for tensor, values in zip((p, state.average, state.square), zip(*rows)):
            exact = torch.tensor(values, dtype=torch.float64)
            torch.testing.assert_close(tensor.flatten(), exact, rtol=0, atol=2e-14)
    assert [state.step.item() for state in states] == [1, 3, 1001]


def test_float32_errs_only_by_its_roundings(rules):
    parameters, gradients, states = example(rules, torch.float32)
    exact = [t.double() for t in parameters], [t.double() for t in gradients]
    exact_states = [State(s.average.double(), s.square.double(), s.step.clone()) for s in states]
    settings = rule(rules, betas=(0.9, 0.999), eps=1e-8)
    before = [p.clone() for p in exact[0]]
    take_step(rules, *exact, exact_states, settings)
    take_step(rules, parameters, gradients, states, settings)
    unit = 2.0**-24
    for p, reference, start in zip(parameters, exact[0], before):
        # Two roundings of the parameter and at most twelve of the update, each rounding `unit` of the larger terms.
        bound = unit * (2.1 * start.abs() + 12 * (reference - start).abs().clamp_min(SETTINGS["lr"]))
        assert ((p.double() - reference).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_float32_rounded_once(rules, dtype):
    parameters, gradients, states = example(rules, dtype)
    wide = [t.float() for t in parameters], [t.float() for t in gradients]
    wide_states = [State(s.average.float(), s.square.float(), s.step.clone()) for s in states]
    take_step(rules, parameters, gradients, states, rule(rules))
    take_step(rules, *wide, wide_states, rule(rules))
    for tensor, reference in zip(tensors(parameters, states), tensors(wide[0], wide_states)):
        assert torch.equal(tensor, reference.to(tensor.dtype))
        assert tensor.dtype == dtype or tensor.ndim == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("turned", ["parameter", "gradient", "average", "square"])
def test_strides_do_not_matter(rules, dtype, turned):
    parameters, gradients, states = example(rules, dtype)
    plain = [[t.clone() for t in (p, g, *s)] for p, g, s in zip(parameters, gradients, states)]
    place = ("parameter", "gradient", "average", "square").index(turned)
    other = [[t.clone() for t in row] for row in plain]
    for row in other[1:]:
        row[place] = row[place].mT.contiguous().mT
    for rows in (plain, other):
        moments = [State(*row[2:]) for row in rows]
        take_step(rules, [row[0] for row in rows], [row[1] for row in rows], moments, rule(rules))
    assert other[1][place].stride() != plain[1][place].stride()
    assert all(torch.equal(a, b) for row, other_row in zip(plain, other) for a, b in zip(row, other_row))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tensor_lr_equals_the_number_in_it(rules, dtype):
    results = []
    for lr in (0.125, torch.tensor(0.125, dtype=dtype)):
        parameters, gradients, states = example(rules, torch.float32)
        take_step(rules, parameters, gradients, states, rule(rules, lr=lr))
        results.append(parameters)
    assert all(torch.equal(p, other) for p, other in zip(*results))


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_gradients_are_left_unchanged(rules, dtype, maximize):
    parameters, gradients, states = example(rules, dtype)
    before = [g.clone() for g in gradients]
    take_step(rules, parameters, gradients, states, rule(rules, maximize=maximize))
    assert all(torch.equal(g, old) and g._version == 0 for g, old in zip(gradients, before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_changed_parameters_raise_their_version_counters(rules, dtype):
    parameters, gradients, states = example(rules, dtype)
    before = [p._version for p in parameters]
    take_step(rules, parameters, gradients, states, rule(rules))
    assert all(p._version > old for p, old in zip(parameters, before))


def test_zero_gradients_at_lr_zero_change_no_weight(rules):
    parameters, _, _ = example(rules, torch.float32)
    before = [p.clone() for p in parameters]
    zeros = [torch.zeros_like(p) for p in parameters]
    take_step(rules, parameters, zeros, states_of(rules, parameters), rule(rules, lr=0.0))
    assert all(torch.equal(p, old) for p, old in zip(parameters, before))


def test_nan_gradient_stays_in_its_element(rules):
    parameters, gradients, states = example(rules)
    gradients[1][2, 3] = math.nan
    take_step(rules, parameters, gradients, states, rule(rules))
    assert [int(p.isnan().sum()) for p in parameters] == [0, 1, 0]


def test_nothing_is_read_on_the_host(rules):
    """A tensor without values raises where one is asked for; a graph capture would, too."""
    with FakeTensorMode():
        parameters = [torch.empty(3, 4, dtype=torch.bfloat16), torch.empty(5, dtype=torch.bfloat16)]
        gradients, *averages = ([torch.empty_like(p) for p in parameters] for _ in range(3))
        states = [State(*tensors, torch.empty(())) for tensors in zip(*averages)]
        take_step(rules, parameters, gradients, states, rule(rules, lr=torch.empty(()), maximize=True))


def test_counts_may_have_a_dimension(rules):
    """As a file may have them."""
    expected, others = example(rules), example(rules)
    take_step(rules, *expected, rule(rules))
    states = [state._replace(step=state.step.reshape(1)) for state in others[2][:1]] + others[2][1:]
    take_step(rules, others[0], others[1], states, rule(rules))
    assert all(map(torch.equal, tensors(others[0], others[2]), tensors(expected[0], expected[2])))


def test_cautious_decay_goes_by_the_sign_of_the_update(rules):
    """Not by that of the average, which the last gradient may not have turned yet: 0.05 here, and N is -0.8."""
    steps = []
    for decay in (0.0, 0.5):
        p, gradient, average = (torch.tensor([value], dtype=torch.float64) for value in (1.0, -8.5, 1.0))
        changed = rule(rules, weight_decay=decay, decay_mode="cautious")
        take_step(rules, [p], [gradient], [State(average, torch.ones_like(p), torch.tensor(1.0))], changed)
        steps.append(p)
    assert torch.equal(*steps)
