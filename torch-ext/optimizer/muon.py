"""Muon: momentum, orthogonalized, for the matrices; AdamW for the rest; one `torch.optim.Optimizer`."""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch
from torch import Tensor
from torch.optim import Optimizer

from .distributed.pipeline import Recipe, update_batch_
from .distributed.plan import Batch, plan_batches, positions_by
from .learning_rate import step_multiplier
from .param_groups import dtype_name, loaded_group, names_of, plain_settings, split_group
from .parameters import check_gradient, check_parameter
from .routing import Explanation, IsMuon, Route
from .rules.adamw import AdamWRule, AdamWState, adamw_
from .rules.descent import descent_rule
from .rules.momentum import MomentumRule
from .schedules import resolve_schedule
from .state import ensure_state

# The settings that the plan depends on.
_PLANNED = ("ns_coefficients", "ns_steps", "ns_dtype", "ns_method")


class Muon(Optimizer):
    """Muon for matrices and AdamW for every other parameter.

    One step of a rows x cols matrix W with gradient G, of the group's settings:

        M <- momentum * M + (1 - momentum) * G
        D  = momentum * M + (1 - momentum) * G  if nesterov else  M
        W <- W * (1 - lr * weight_decay) - lr * multiplier(rows, cols) * orthogonalize(D)

    Args:
        params: tensors, `(name, tensor)` pairs such as `model.named_parameters()`, or group dicts of either. A group
            that holds both kinds becomes two neighbours, so that each has one live `lr`. Group keys: every argument
            below except `is_muon`, and `use_muon` or its opposite `use_fallback` (absent: decided by routing).
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
        ns_method: `standard`, `gram`, `gram_float32`, or `auto`, the cheaper where both are safe (`orthogonalize`).
        maximize: ascend.
        is_muon: `(name, parameter) -> True, False or None`, where None leaves the decision to routing.
        adamw_lr: `lr` of AdamW's groups that bring none of their own; None: `lr`.
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
        ns_method: str = "auto",
        maximize: bool = False,
        is_muon: Optional[IsMuon] = None,
        adamw_lr: float | Tensor | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
    ):
        self._is_muon = is_muon
        self._reasons: dict[Tensor, str] = {}
        self._planned_for: list[tuple] = []
        self._plans: list[tuple[Batch, ...]] = []
        settings = dict(
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            eps=eps,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
            ns_dtype=ns_dtype,
            ns_method=ns_method,
            maximize=maximize,
            adamw_betas=adamw_betas,
            adamw_eps=adamw_eps,
        )
        plain = plain_settings({**settings, "adamw_lr": adamw_lr})
        self._adamw_lr = plain.pop("adamw_lr")
        super().__init__(params, plain)
        self._refresh()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as two neighbours where it holds both matrices and other parameters.

        `param_group` is left as it is. Raises ValueError or TypeError, with nothing added, for settings or parameters
        that cannot work.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(param_group).__name__}")
        count = sum(len(group["params"]) for group in self.param_groups)
        defaults = {**self.defaults, "adamw_lr": self._adamw_lr}
        groups, reasons = split_group(param_group, defaults, self._is_muon, count)
        before = len(self.param_groups)
        try:
            for group in groups:
                super().add_param_group(group)
        except Exception:
            del self.param_groups[before:]
            raise
        self._reasons.update(reasons)

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None):
        """Update every parameter that has a gradient, and return what `closure`, called first if given, returns.

        Parameters and state change in place; gradients do not. Raises ValueError before anything is changed for
        gradients that are sparse, and for parameters whose shape is no longer that of their state.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refresh()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                check_gradient(p)
                if p not in self.state:  # frozen at construction, with a gradient all the same
                    ensure_state(self.state[p], p, group["use_muon"])
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
            for i, (name, p) in enumerate(zip(names_of(group), group["params"])):
                rows.append(self._route(name, p, group, batch_of.get(i)))
        return Explanation(rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the state and groups, of the parameters as they are now."""
        self._refresh()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of what `state_dict` returned for the same parameters in the same order.

        What a group does not have, as those of `torch.optim.Muon`, stays as it is here, and momentum keeps the dtype
        that it was saved in. Raises ValueError or TypeError, with nothing changed, where a group or state does not fit.
        """
        given: dict[str, Any] = {}
        hook = self.register_load_state_dict_pre_hook(lambda _, final: given.update(final))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        params = [p for group in self.param_groups for p in group["params"]]
        positions = [i for group in given["param_groups"] for i in group["params"]]
        for position, p in zip(positions, params):
            for key, value in given["state"].get(position, {}).items():
                # torch would share the saved tensors, and has cast momentum to the parameter's dtype.
                dtype = value.dtype if key == "momentum_buffer" else self.state[p][key].dtype
                self.state[p][key] = value.to(self.state[p][key].device, dtype, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        kept = {key: getattr(self, key) for key in ("_is_muon", "_adamw_lr", "_reasons")}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Loading comes here too, after every hook and before anything is changed.
        if "param_groups" in self.__dict__:
            loaded = zip(self.param_groups, state["param_groups"])
            groups = [loaded_group(own, saved, state["state"]) for own, saved in loaded]
            state = {**state, "param_groups": groups}
        super().__setstate__(state)
        self._planned_for, self._plans = [], []

    def _step_muon(self, group: dict[str, Any], batches: tuple[Batch, ...]) -> None:
        params = group["params"]
        recipe = Recipe(
            MomentumRule(group["momentum"], group["nesterov"], group["maximize"]),
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
        for members in positions_by((p.device, p.dtype) for p in params):
            chosen = [params[i] for i in members]
            states = [self.state[p] for p in chosen]
            states = [AdamWState(s["exp_avg"], s["exp_avg_sq"], s["step"]) for s in states]
            adamw_(chosen, [p.grad for p in chosen], states, rule)

    def _refresh(self) -> None:
        """Bring plans and state in line with the parameters.

        Wrappers and `module.to()` replace or change them without a word, so that every step compares.
        """
        now = [
            (p, p.device, p.dtype, p.shape, p.requires_grad, *(group[key] for key in _PLANNED))
            for group in self.param_groups
            for p in group["params"]
        ]
        before = self._planned_for
        if len(now) == len(before) and all(a[0] is b[0] and a[1:] == b[1:] for a, b in zip(now, before)):
            return
        for group in self.param_groups:
            for name, p in zip(names_of(group), group["params"]):
                check_parameter(name, p, group["use_muon"])
                if not p.is_meta and (p.requires_grad or p in self.state):
                    ensure_state(self.state[p], p, group["use_muon"])
        current = {p for group in self.param_groups for p in group["params"]}
        for stale in [p for p in self.state if isinstance(p, Tensor) and p not in current]:
            del self.state[stale]
        self._plans = [self._plan(group) for group in self.param_groups]
        self._planned_for = now

    def _plan(self, group: dict[str, Any]) -> tuple[Batch, ...]:
        if not group["use_muon"]:
            return ()
        # A frozen parameter has no buffer yet; one that it gets later is like the parameter.
        buffers = [self.state[p]["momentum_buffer"] if p in self.state else p for p in group["params"]]
        name = dtype_name(group["ns_dtype"])
        schedule = resolve_schedule(group["ns_coefficients"], group["ns_steps"])
        return plan_batches(group["params"], buffers, schedule, group["ns_method"], name and getattr(torch, name))

    def _route(self, name: str, p: Tensor, group: dict[str, Any], batch: Optional[Batch]) -> Route:
        # A parameter that a wrapper has put in another's place was not routed: its group says where it is.
        reason = self._reasons.get(p, "use_muon")
        if batch is None:
            return Route(name, tuple(p.shape), "adamw", reason, 0, None, None, "torch._fused_adamw_")
        multiplier = step_multiplier(group["adjust_lr_fn"], batch.rows, batch.cols)
        return Route(name, tuple(p.shape), "muon", reason, 1, multiplier, None, str(batch.iteration))
