"""Golden runs of published optimizers, as tests take them: their parameters, gradients and results, and our options."""

import json

import numpy as np
import torch


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


def run(trajectory, dtype, make):
    """Yield the step, the optimizer `make(params, **changes)` and the named parameters after every step."""
    case = trajectory.case
    params = {
        name: torch.nn.Parameter(trajectory.sequence(name, start=True).to(dtype, copy=True))
        for name in trajectory.shapes
    }
    gradients = {name: trajectory.sequence(name, start=False).to(dtype) for name in trajectory.shapes}
    optimizer = make(params)
    for step in range(1, trajectory.steps + 1):
        if step == case.get("set_lr", [0])[0]:
            for group in optimizer.param_groups:
                group["lr"] = case["set_lr"][1]
        for name, p in params.items():
            p.grad = None if step in trajectory.none_grads.get(name, ()) else gradients[name][step - 1].clone()
        optimizer.step()
        if step == case.get("reload_at"):
            saved = optimizer.state_dict()
            optimizer = make(params, lr=1.0)
            optimizer.load_state_dict(saved)
        yield step, optimizer, params


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


def load_trajectories(kernel, repository):
    """Return every golden case of the repository."""
    folder = repository / "tests/golden"
    golden = json.loads((folder / "trajectories.json").read_text())
    arrays = dict(np.load(folder / "trajectories.npz", allow_pickle=False))
    return [Trajectory(kernel, golden, arrays, case) for case in golden["cases"]]


def norm_as_in_references(kernel, monkeypatch, eps):
    """Let the package add `eps` to the norm, the only term in which the references differ; None: as it is."""
    monkeypatch.undo()
    if eps is not None:
        norm = kernel.kernels.normalization.frobenius_norm
        monkeypatch.setattr(kernel.polar.factors, "normalize", lambda G, *_: G / (norm(G) + eps).to(G.dtype))
