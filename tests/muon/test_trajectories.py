"""Twelve steps beside three published optimizers, parameter by parameter."""

import json

import numpy as np
import pytest
import torch

FLOORS = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 5e-3}


class Trajectory:
    """One golden case: its parameters, gradients, expected values and our options for it."""

    def __init__(self, kernel, golden, arrays, case):
        self.case, self.arrays, self.kind = case, arrays, case["kind"]
        self.shapes = {name: tuple(shape) for name, shape in golden["parameter_sets"][self.kind]}
        self.none_grads = golden["none_grads"].get(self.kind, {})
        self.steps, self.base_seed = golden["steps"], golden["base_seed"]
        self.options, self.added_eps = our_options(kernel, case)

    def sequence(self, name, start):
        """The start value, or the gradients of all steps, of one parameter; made by the golden recipe if not stored."""
        key = f"{self.kind}/{'init' if start else 'grads'}/{name}"
        if key in self.arrays:
            return torch.from_numpy(self.arrays[key])
        i, shape = list(self.shapes).index(name), self.shapes[name]
        if start:
            return torch.from_numpy(
                (0.1 * np.random.RandomState(self.base_seed + i).standard_normal(shape)).astype("f4")
            )
        draws = [
            np.random.RandomState(self.base_seed + 1000 * t + i).standard_normal(shape)
            for t in range(1, self.steps + 1)
        ]
        return torch.from_numpy((10.0 ** (i % 4 - 2) * np.stack(draws)).astype("f4"))

    def expected(self, step):
        """The parameters after `step`, by name; of `extreme` every 64th column is stored."""
        flat, values = torch.from_numpy(self.arrays[f"{self.case['id']}/s{step}/p"]), {}
        for name, shape in self.shapes.items():
            stored = (shape[0], shape[1] // 64) if name == "extreme" else shape
            values[name], flat = flat[: int(np.prod(stored))].reshape(stored), flat[int(np.prod(stored)) :]
        assert flat.numel() == 0
        return values


def our_options(kernel, case):
    """Return our arguments for a case's, and the eps that its reference adds to the norm where we clamp it."""
    o = case["options"]
    options = dict(lr=o["lr"], weight_decay=o["weight_decay"], momentum=o["momentum"], nesterov=o["nesterov"])
    options.update(adamw_betas=tuple(o["betas"]), adamw_eps=o.get("eps", 1e-7), expert_keys=("experts",))
    options.update((key, o[key]) for key in ("conv_mode", "normalize_spatial") if key in o)
    if case["kind"] == "timm":
        s = o.get("safety_factor", 1.0)
        (a, b, c), *rest = kernel.schedules.resolve_schedule(o["ns_coefficients"], o["ns_steps"])
        schedule = [(a / s, b / s**3, c / s**5), *rest]
        options.update(adjust_lr_fn=o["adjust_lr_fn"], adamw_lr=o["adamw_lr"], eps=1e-7 / s)
        options.update(fallback="nadamw" if o["nesterov"] else "adamw")
        return {**options, "ns_coefficients": schedule, "ns_steps": o["ns_steps"]}, None
    if case["kind"] == "wrapper":
        safety = 1.02 if o["ns_mode"] == "fp16" else 1.0
        schedule, steps = [tuple(k / safety for k in (3.4445, -4.7750, 2.0315))], o["ns_iters"]
    else:
        schedule, steps = kernel.polar_express(1e-3, 10, 1e-2, 0.02), o["ns_steps"]
    options.update(ns_coefficients=schedule, ns_steps=steps)
    # The references sum gradients where we average them: their buffers, and norms, are 1 / (1 - momentum) as large.
    return options, (1 - o["momentum"]) * 1e-7


def run(kernel, trajectory, dtype, work_dtype):
    """Yield the step, the optimizer and the named parameters after every step."""
    case = trajectory.case
    params = {
        name: torch.nn.Parameter(trajectory.sequence(name, start=True).to(dtype, copy=True))
        for name in trajectory.shapes
    }
    gradients = {name: trajectory.sequence(name, start=False).to(dtype) for name in trajectory.shapes}
    optimizer = kernel.Muon(params.items(), ns_dtype=work_dtype, **trajectory.options)
    for step in range(1, trajectory.steps + 1):
        if step == case.get("set_lr", [0])[0]:
            for group in optimizer.param_groups:
                group["lr"] = case["set_lr"][1]
        for name, p in params.items():
            p.grad = None if step in trajectory.none_grads.get(name, ()) else gradients[name][step - 1].clone()
        optimizer.step()
        if step == case.get("reload_at"):
            saved = optimizer.state_dict()
            optimizer = kernel.Muon(params.items(), ns_dtype=work_dtype, **{**trajectory.options, "lr": 1.0})
            optimizer.load_state_dict(saved)
        yield step, optimizer, params


@pytest.fixture(scope="module")
def golden(repository):
    return json.loads((repository / "tests/golden/trajectories.json").read_text())


@pytest.fixture(scope="module")
def arrays(repository):
    return dict(np.load(repository / "tests/golden/trajectories.npz", allow_pickle=False))


@pytest.fixture
def trajectories(kernel, golden, arrays):
    return [Trajectory(kernel, golden, arrays, case) for case in golden["cases"]]


@pytest.fixture
def norm_as_in_references(kernel, monkeypatch):
    """Make a function that lets the package add eps to the norm: the only term in which the references differ."""

    def add(eps):
        if eps is not None:
            norm = kernel.kernels.normalization.frobenius_norm
            monkeypatch.setattr(kernel.polar, "normalize", lambda G, *_: G / (norm(G) + eps).to(G.dtype))
        else:
            monkeypatch.undo()

    return add


def errors(trajectory, optimizer, params, step):
    """Yield the name, the branch and ||p - ref|| / ||ref - start|| of every parameter."""
    expected = trajectory.expected(step)
    for route in optimizer.explain().rows:
        p = params[route.name].detach().double()
        start = trajectory.sequence(route.name, start=True).double()
        if route.name == "extreme":
            p, start = p[:, ::64], start[:, ::64]
        reference = expected[route.name].double()
        moved = (reference - start).norm()
        yield route.name, route.branch, ((p - reference).norm() / moved).item() if moved else p.ne(start).sum()


@pytest.mark.kernels_ci
def test_float64_follows_the_published_optimizers(kernel, trajectories, norm_as_in_references):
    seen = {"muon": 0, "adamw": 0, "nadamw": 0}
    for trajectory in trajectories:
        norm_as_in_references(trajectory.added_eps)
        for step, optimizer, params in run(kernel, trajectory, torch.float64, None):
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
        for step, optimizer, params in run(kernel, trajectory, torch.float64, None):
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
        for step, optimizer, params in run(kernel, trajectory, torch.float32, work_dtype):
            if step not in (1, 2, 5, 12):
                continue
            for name, _, error in errors(trajectory, optimizer, params, step):
                reference = reference_errors[name] if work_dtype == "float32" else largest
                assert error <= max(FLOORS[work_dtype], 4 * reference), (trajectory.case["id"], step, name)
                compared += 1
    assert compared > (10 if work_dtype == "float16" else 100)  # one case was recorded in float16
