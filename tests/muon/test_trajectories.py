"""Twelve steps beside three published optimizers, parameter by parameter."""

import numpy as np
import pytest
import torch

from tests.support.trajectories import errors, load_trajectories, norm_as_in_references, run

FLOORS = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 5e-3}


@pytest.fixture
def trajectories(kernel, repository):
    return load_trajectories(kernel, repository)


def steps(kernel, trajectory, dtype, work_dtype=None):
    """The step, the optimizer with our options and the named parameters after every step."""

    def make(params, **changes):
        return kernel.Muon(params.items(), ns_dtype=work_dtype, **{**trajectory.options, **changes})

    return run(trajectory, dtype, make)


def test_float64_follows_the_published_optimizers(kernel, trajectories, monkeypatch):
    seen = {"muon": 0, "adamw": 0, "nadamw": 0}
    for trajectory in trajectories:
        norm_as_in_references(kernel, monkeypatch, trajectory.added_eps)
        for step, optimizer, params in steps(kernel, trajectory, torch.float64):
            if step not in (1, 2, 5, 12):
                continue
            for name, branch, error in errors(trajectory, optimizer, params, step):
                assert error <= trajectory.case["tol_rel_float64"], (trajectory.case["id"], step, name)
                seen[branch] += 1
    assert seen["muon"] > 200 and seen["adamw"] > 100 and seen["nadamw"] > 50


def stored_buffers(trajectory, step):
    """Yield the name and golden momentum buffer of the matrices that have one stored after `step`."""
    flat = trajectory.arrays.get(f"{trajectory.case['id']}/s{step}/m")
    for name in trajectory.case["momentum_order"].get(str(step), ()):
        shape = trajectory.shapes[name]
        buffer, flat = flat[: np.prod(shape)].reshape(shape), flat[np.prod(shape) :]
        yield name, buffer


def test_float64_state_is_the_published_state(kernel, trajectories):
    compared = 0
    for trajectory in (t for t in trajectories if t.kind == "timm"):
        for step, optimizer, params in steps(kernel, trajectory, torch.float64):
            for name, expected in stored_buffers(trajectory, step):
                buffer = optimizer.state[params[name]]["momentum_buffer"].numpy()
                np.testing.assert_allclose(buffer, expected, rtol=1e-12, atol=1e-12 * np.abs(expected).max())
                compared += 1
    assert compared > 100


@pytest.mark.parametrize("work_dtype", ["float32", "bfloat16", "float16"])
def test_other_work_dtypes_err_no_more_than_the_references(kernel, trajectories, work_dtype):
    compared = 0
    for trajectory in trajectories:
        reference_errors = trajectory.case["ref_rel_error"].get(work_dtype)
        if reference_errors is None:
            continue
        largest = max(error for error in reference_errors.values() if error is not None)
        for step, optimizer, params in steps(kernel, trajectory, torch.float32, work_dtype):
            if step not in (1, 2, 5, 12):
                continue
            for name, _, error in errors(trajectory, optimizer, params, step):
                reference = reference_errors[name] if work_dtype == "float32" else largest
                assert error <= max(FLOORS[work_dtype], 4 * reference), (trajectory.case["id"], step, name)
                compared += 1
    assert compared > (10 if work_dtype == "float16" else 100)  # one case was recorded in float16
