"""An optimizer whose plan and state follow its parameters, whatever wrappers and checkpoints do to them."""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor
from torch.optim import Optimizer

from .distributed.plan import Batch, Settings, plan_batches
from .matrices import MatrixView
from .param_groups import PLANNED, RECIPE, loaded_group, names_of, split_group, view_in_group, work_dtype_of
from .parameters import check_parameter
from .routing import IsMuon
from .schedules import resolve_schedule
from .state import ensure_state, laid_out_like


class PlannedOptimizer(Optimizer):
    """Groups that are all Muon's or all of the fallback, and one plan for the matrices of all of them.

    `adamw_lr` is the learning rate of groups split off for the fallback, None for that of the group they come from.
    State is made at construction, and again for parameters that come later.
    """

    # What a copy or a pickle keeps besides groups and state.
    _kept: tuple[str, ...] = ("_is_muon", "_adamw_lr", "_reasons")

    def __init__(self, params, defaults: dict[str, Any], is_muon: Optional[IsMuon], adamw_lr: float | Tensor | None):
        self._is_muon = is_muon
        self._adamw_lr = adamw_lr
        self._reasons: dict[Tensor, str] = {}
        self._forget_plan()
        super().__init__(params, defaults)
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
                own = self.state[p][key]
                dtype = value.dtype if key == "momentum_buffer" else own.dtype
                self.state[p][key] = laid_out_like(own, value, dtype, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{key: getattr(self, key) for key in self._kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Loading comes here too, after every hook and before anything is changed.
        if "param_groups" in self.__dict__:
            loaded = zip(self.param_groups, state["param_groups"])
            groups = [loaded_group(own, saved, state["state"]) for own, saved in loaded]
            state = {**state, "param_groups": groups}
        super().__setstate__(state)
        self._forget_plan()

    def _forget_plan(self) -> None:
        self._planned_for: list[tuple] = []
        self._matrices: list[tuple[Tensor, dict[str, Any]]] = []  # Muon's parameters and their groups
        self._views: list[MatrixView] = []
        self._batches: tuple[Batch, ...] = ()

    def _refresh(self) -> bool:
        """Bring plan and state in line with parameters and settings; return whether there was something to do.

        Wrappers and `module.to()` replace or change parameters without a word, so that every step compares.
        """
        kinds = [tuple(group[key] for key in RECIPE) for group in self.param_groups]
        # Settings that schedulers move are compared with each other: groups that differ are not batched together.
        settings = [
            (kinds.index(kind), *(group[key] for key in PLANNED)) for kind, group in zip(kinds, self.param_groups)
        ]
        now = [
            (p, p.device, p.dtype, p.shape, p.stride(), p.requires_grad, own)
            for group, own in zip(self.param_groups, settings)
            for p in group["params"]
        ]
        before = self._planned_for
        if len(now) == len(before) and all(a[0] is b[0] and a[1:] == b[1:] for a, b in zip(now, before)):
            return False
        for group in self.param_groups:
            for name, p in zip(names_of(group), group["params"]):
                check_parameter(name, p, group["use_muon"])
                if not p.is_meta and (p.requires_grad or p in self.state):
                    ensure_state(self.state[p], p, group)
        current = {p for group in self.param_groups for p in group["params"]}
        for stale in [p for p in self.state if isinstance(p, Tensor) and p not in current]:
            del self.state[stale]
        self._make_plan([own[0] for own in settings])
        self._planned_for = now
        return True

    def _make_plan(self, kinds: list[int]) -> None:
        self._matrices, self._views, settings = [], [], []
        for group, kind in zip(self.param_groups, kinds):
            if not group["use_muon"]:
                continue
            schedule = resolve_schedule(group["ns_coefficients"], group["ns_steps"])
            own = Settings(schedule, group["ns_method"], work_dtype_of(group), group["adjust_lr_fn"], kind)
            for name, p in zip(names_of(group), group["params"]):
                self._matrices.append((p, group))
                self._views.append(view_in_group(name, p, group))
                settings.append(own)
        parameters = [p for p, _ in self._matrices]
        # A frozen parameter has no buffer yet; one that it gets later is like the parameter.
        buffers = [self.state[p]["momentum_buffer"] if p in self.state else p for p in parameters]
        self._batches = plan_batches(parameters, buffers, self._views, settings)
