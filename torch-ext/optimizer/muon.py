"""Muon: momentum, orthogonalized, for the matrices; AdamW for the rest; one `torch.optim.Optimizer`."""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch
from torch import Tensor
from torch.optim import Optimizer

from .distributed.pipeline import Recipe, update_batch_
from .distributed.plan import Batch, device_and_dtype, plan_batches, positions_by
from .kernels.gemms import select_gemms
from .learning_rate import step_multiplier
from .param_groups import check_settings, split_group
from .routing import Explanation, IsMuon, Route, decide
from .rules.adamw import AdamWRule, AdamWState, adamw_
from .rules.descent import descent_rule
from .rules.momentum import MomentumRule
from .schedules import resolve_schedule


class Muon(Optimizer):
    """Muon for matrices and AdamW for every other parameter.

    One step of a rows x cols matrix W with gradient G, of the group's settings:

        M <- momentum * M + (1 - momentum) * G
        D  = momentum * M + (1 - momentum) * G  if nesterov else  M
        W <- W * (1 - lr * weight_decay) - lr * multiplier(rows, cols) * orthogonalize(D)

    Args:
        params: tensors, `(name, tensor)` pairs such as `model.named_parameters()`, or group dicts of either. A group
            that holds both kinds becomes two neighbours, so that each has one live `lr`. Group keys: every argument
            below except `is_muon` and `adamw_lr`, and `use_muon` (absent: decided by routing, see `explain()`).
        lr: step size in units of the multiplier; a float or a 0-d tensor, read at every step.
        weight_decay: decoupled, of every parameter of the group.
        momentum: beta of the average of gradients.
        nesterov: look one step ahead.
        ns_coefficients: a preset of `schedules.PRESETS`, one `(a, b, c)` or a sequence of them.
        eps: a matrix is divided by max(norm, eps); 0 makes the update free of the gradient's scale.
        ns_steps: steps of the iteration.
        adjust_lr_fn: `match_rms_adamw` (updates as large as AdamW's), `original` (spectral norm; also None) or
            `rms_to_rms`.
        ns_dtype: dtype of the iteration, a torch.dtype or its name; None: `polar.default_work_dtype`.
        maximize: ascend.
        is_muon: `(name, parameter) -> True, False or None`, where None leaves the decision to routing.
        adamw_lr: `lr` of the AdamW groups that the split makes; None: `lr`.
        adamw_betas, adamw_eps: of AdamW.

    State: `momentum_buffer` for matrices; `step`, `exp_avg`, `exp_avg_sq` for the rest; made at construction.
    Raises ValueError or TypeError for settings that cannot work, before anything is changed.
    """

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients="polar_express",
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Optional[str] = "match_rms_adamw",
        *,
        ns_dtype: torch.dtype | str | None = None,
        maximize: bool = False,
        is_muon: Optional[IsMuon] = None,
        adamw_lr: float | Tensor | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
    ):
        self._is_muon = is_muon
        self._adamw_lr = adamw_lr
        self._signature: list = []
        self._plans: list[tuple[Batch, ...]] = []
        defaults = dict(
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            eps=eps,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
            ns_dtype=ns_dtype,
            maximize=maximize,
            adamw_betas=adamw_betas,
            adamw_eps=adamw_eps,
        )
        check_settings({**defaults, "adamw_lr": adamw_lr})
        super().__init__(params, defaults)
        self._refresh()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as two neighbours where it holds both matrices and other parameters.

        `param_group` is left as it is. Raises ValueError or TypeError, with nothing added, for settings or parameters
        that cannot work.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(param_group).__name__}")
        named = any("param_names" in group for group in self.param_groups)
        whole = {**self.defaults, "adamw_lr": self._adamw_lr, **param_group}
        before = len(self.param_groups)
        try:
            for group in split_group(whole, self._is_muon, named):
                super().add_param_group(group)
        except Exception:
            del self.param_groups[before:]
            raise

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None):
        """Update every parameter that has a gradient, and return what `closure`, called first if given, returns.

        Parameters and state change in place; gradients do not. Raises ValueError for sparse gradients before anything
        is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refresh()
        for group in self.param_groups:
            _check_gradients(group["params"])
        for group, batches in zip(self.param_groups, self._plans):
            if group["use_muon"]:
                self._step_muon(group, batches)
            else:
                self._step_adamw(group)
        return loss

    def explain(self) -> Explanation:
        """Return each parameter's branch, the reason, its multiplier and the products it runs on; print it."""
        rows = []
        self._refresh()
        for group, batches in zip(self.param_groups, self._plans):
            batch_of = {i: batch for batch in batches for i in batch.members}
            names = group.get("param_names") or [f"param_{len(rows) + i}" for i in range(len(group["params"]))]
            for i, (name, p) in enumerate(zip(names, group["params"])):
                rows.append(self._route(name, p, group, batch_of.get(i)))
        return Explanation(rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the state and groups, of the parameters as they are now."""
        self._refresh()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned for the same parameters in the same order.

        Raises ValueError, with nothing changed, where a group or a state tensor does not fit.
        """
        for own, saved in zip(self.param_groups, state_dict["param_groups"]):
            _check_loadable(own, saved, state_dict["state"])
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_is_muon": self._is_muon, "_adamw_lr": self._adamw_lr}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._signature, self._plans = [], []
        for group in self.param_groups:
            for key, default in self.defaults.items():
                group.setdefault(key, default)

    def _step_muon(self, group: dict[str, Any], batches: tuple[Batch, ...]) -> None:
        params = group["params"]
        recipe = Recipe(
            MomentumRule(group["momentum"], group["nesterov"], group["maximize"]),
            resolve_schedule(group["ns_coefficients"], group["ns_steps"]),
            group["eps"],
            descent_rule(group["lr"], group["weight_decay"]),
        )
        for batch in batches:
            members = [params[i] for i in batch.members if params[i].grad is not None]
            if not members:
                continue
            buffers = [self.state[p]["momentum_buffer"] for p in members]
            multiplier = step_multiplier(group["adjust_lr_fn"], batch.rows, batch.cols)
            update_batch_(batch, members, buffers, multiplier, recipe)

    def _step_adamw(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        rule = AdamWRule(
            group["lr"], group["adamw_betas"], group["adamw_eps"], group["weight_decay"], group["maximize"]
        )
        for members in positions_by(params, device_and_dtype):
            chosen = [params[i] for i in members]
            states = [self.state[p] for p in chosen]
            states = [AdamWState(s["exp_avg"], s["exp_avg_sq"], s["step"]) for s in states]
            adamw_(chosen, [p.grad for p in chosen], states, rule)

    def _refresh(self) -> None:
        """Bring plans and state in line with the parameters, which wrappers and `module.to()` may have replaced."""
        signature = [
            (group["ns_dtype"], [(id(p), p.device, p.dtype, p.requires_grad) for p in group["params"]])
            for group in self.param_groups
        ]
        if signature == self._signature:
            return
        self._plans = [
            plan_batches(group["params"], group["ns_dtype"] and getattr(torch, group["ns_dtype"]))
            if group["use_muon"]
            else ()
            for group in self.param_groups
        ]
        current = {p for group in self.param_groups for p in group["params"]}
        for stale in [p for p in self.state if isinstance(p, Tensor) and p not in current]:
            del self.state[stale]
        for group in self.param_groups:
            for p in group["params"]:
                self._ensure_state(p, group["use_muon"])
        self._signature = signature

    def _ensure_state(self, p: Tensor, use_muon: bool) -> None:
        if p.is_meta or not (p.requires_grad or p in self.state):
            return
        state = self.state[p]
        for key in ("momentum_buffer",) if use_muon else ("exp_avg", "exp_avg_sq"):
            if key not in state:
                state[key] = torch.zeros_like(p)
            elif state[key].device != p.device or not use_muon:
                state[key] = state[key].to(p.device, None if use_muon else p.dtype)
        if not use_muon:
            state["step"] = state.get("step", torch.zeros((), dtype=torch.float32)).to(p.device)

    def _route(self, name: str, p: Tensor, group: dict[str, Any], batch: Optional[Batch]) -> Route:
        branch = "muon" if group["use_muon"] else "adamw"
        natural, reason = decide([name], p)
        reason = reason if natural == branch else "use_muon or is_muon"
        if batch is None:
            return Route(name, tuple(p.shape), branch, reason, 0, None, None, "torch._fused_adamw_")
        multiplier = step_multiplier(group["adjust_lr_fn"], batch.rows, batch.cols)
        gemms = select_gemms(p.device, batch.work_dtype, *sorted(p.shape))
        kernel = f"{gemms.name} {batch.work_dtype}".replace("torch.", "")
        return Route(name, tuple(p.shape), branch, reason, 1, multiplier, None, kernel)


def _check_gradients(params) -> None:
    for p in params:
        if p.grad is not None and p.grad.layout != torch.strided:
            raise ValueError(f"gradients must be dense, got layout {p.grad.layout} for a parameter {tuple(p.shape)}")


def _check_loadable(own: dict[str, Any], saved: dict[str, Any], state: dict[int, dict[str, Any]]) -> None:
    if saved.get("use_muon", own["use_muon"]) != own["use_muon"]:
        names = {True: "Muon", False: "AdamW"}
        raise ValueError(
            f"a group of {len(saved['params'])} parameters was saved for {names[saved['use_muon']]} "
            f"and is {names[own['use_muon']]}'s here: the parameters or their order differ"
        )
    for position, p in zip(saved["params"], own["params"]):
        for key, value in state.get(position, {}).items():
            if isinstance(value, Tensor) and value.ndim and value.shape != p.shape:
                raise ValueError(f"state {key} has shape {tuple(value.shape)}, its parameter {tuple(p.shape)}")
