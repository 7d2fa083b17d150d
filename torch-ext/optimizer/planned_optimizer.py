"""An optimizer whose plan and state follow its parameters, whatever wrappers and checkpoints do to them."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Mapping, Optional, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from .claims import claims_of
from .distributed.agreement import Accord
from .distributed.exchange_plan import Sharing, plan_exchanges, split_matrices
from .distributed.placement import layout_of, local_part, this_rank
from .distributed.plan import Planned, Settings, plan_batches
from .distributed.shards import sheet_of
from .distributed.summed import plan_sums, split_sums
from .param_groups import (
    PLANNED,
    RECIPE,
    loaded_group,
    names_of,
    saved_group,
    split_group,
    view_in_group,
    work_dtype_of,
)
from .parameters import check_parameter
from .routing import IsMuon
from .schedules import resolve_schedule
from .state import ensure_state, laid_out_like
from .updates import Plan, plan_hosted


class PlannedOptimizer(Optimizer):
    """Groups that are all Muon's or all of the fallback, and one plan for the matrices of all of them.

    `adamw_lr` is the learning rate of groups split off for the fallback, None for that of the group they come from;
    `sharing` is how matrices of several ranks are exchanged.
    State is made at construction, and again for parameters that come later.
    """

    # What a copy or a pickle keeps besides groups and state.
    _kept: tuple[str, ...] = ("_is_muon", "_adamw_lr", "_reasons", "_sharing")
    _plan = Plan()
    _accords: Sequence[Accord] = ()  # of the last step
    _agreed: Mapping[tuple[int, ...], Sequence[str]] = MappingProxyType({})  # claims that ranks have compared

    def __init__(
        self,
        params,
        defaults: dict[str, Any],
        is_muon: Optional[IsMuon],
        adamw_lr: float | Tensor | None,
        sharing: Sharing,
    ):
        self._is_muon = is_muon
        self._adamw_lr = adamw_lr
        self._sharing = sharing
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
            if self._planned_for:  # not while the first groups are added
                self._refresh()
        except Exception:
            del self.param_groups[before:]
            self._forget_plan()
            raise
        self._reasons.update(reasons)

    def state_dict(self) -> dict[str, Any]:
        """Return the state and groups, of the parameters as they are now; of functions only that there was one.

        Raises RuntimeError if ranks had different settings in the last step.
        """
        self._check_accords()
        self._refresh()
        self._plan.synchronize()
        saved = super().state_dict()
        return {**saved, "param_groups": [saved_group(group) for group in saved["param_groups"]]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of what `state_dict` returned for the same parameters in the same order.

        What a group does not have, as those of `torch.optim.Muon`, and functions stay as they are here, and momentum
        keeps the dtype that it was saved in. Raises ValueError or TypeError, with nothing changed, where a group or
        state does not fit.
        """
        given: dict[str, Any] = {}
        # What others' hooks make of the dict counts, and theirs that come after loading see what was loaded.
        hooks = [
            self.register_load_state_dict_pre_hook(lambda _, final: given.update(final)),
            self.register_load_state_dict_post_hook(lambda _: self._copy_state(given), prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _copy_state(self, given: dict[str, Any]) -> None:
        """Copy the tensors of a state dict that was loaded: torch shares them, and casts momentum."""
        params = [(p, group["offload"]) for group in self.param_groups for p in group["params"]]
        positions = [i for group in given["param_groups"] for i in group["params"]]
        for position, (p, offload) in zip(positions, params):
            for key, value in given["state"].get(position, {}).items():
                if key == "step":  # a number in files of torch before 1.12
                    self.state[p][key] = torch.as_tensor(value, dtype=torch.float32).to(p.device, copy=True)
                else:
                    momentum = key == "momentum_buffer"
                    dtype = value.dtype if momentum else self.state[p][key].dtype
                    self.state[p][key] = laid_out_like(p, value, dtype, momentum and offload, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        self._plan.synchronize()
        return {**super().__getstate__(), **{key: getattr(self, key) for key in self._kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Loading comes here too, after every hook and before anything is changed.
        if "param_groups" in self.__dict__:
            loaded = zip(self.param_groups, state["param_groups"])
            groups = [loaded_group(own, saved, state["state"]) for own, saved in loaded]
            state = {**state, "param_groups": groups}
        super().__setstate__(state)
        self._forget_plan()
        self._agreed, self._accords = {}, ()

    def _check_accords(self) -> None:
        """Raise RuntimeError if ranks had different settings in the last step."""
        for accord in self._accords:
            accord.check()

    def _forget_plan(self) -> None:
        self._plan.synchronize()
        self._compared = False
        self._planned_for: list[tuple] = []
        self._plan = Plan()

    def _refresh(self) -> bool:
        """Bring plan and state in line with parameters and settings; return whether there was something to do.

        Wrappers and `module.to()` replace or change parameters without a word, so that every step compares.
        """
        kinds = [tuple(group[key] for key in RECIPE) for group in self.param_groups]
        # Settings that schedulers move are compared with each other: groups that differ are not batched together.
        settings = [
            (kinds.index(kind), *(group[key] for key in PLANNED)) for kind, group in zip(kinds, self.param_groups)
        ]
        now, before = self._planned_now(settings), self._planned_for
        if len(now) == len(before) and all(a[0] is b[0] and a[1:] == b[1:] for a, b in zip(now, before)):
            return False
        self._forget_plan()
        for group in self.param_groups:
            for name, p in zip(names_of(group), group["params"]):
                check_parameter(name, p, group["use_muon"])
                if group["use_muon"] and group["offload"] and layout_of(name, p, self._sharing.ranks) is not None:
                    raise ValueError(f"offload is not supported for matrices of several ranks, as {name} is one")
                if not p.is_meta and (_is_trained(p) or p in self.state):
                    ensure_state(self.state[p], p, group)
        current = {p for group in self.param_groups for p in group["params"]}
        for stale in [p for p in self.state if isinstance(p, Tensor) and p not in current]:
            del self.state[stale]
        self._make_plan([own[0] for own in settings])
        self._planned_for = self._planned_now(settings)
        return True

    def _planned_now(self, settings: list[tuple]) -> list[tuple]:
        """Return what the plan depends on, of every parameter; `settings` are those of the groups."""
        return [
            (p, p.device, p.dtype, p.shape, p.stride(), _is_trained(p), own, self._host_address(p, group))
            for group, own in zip(self.param_groups, settings)
            for p in group["params"]
        ]

    def _host_address(self, p: Tensor, group: dict[str, Any]) -> Optional[int]:
        # What is fetched from host memory is the very tensor that was there when the plan was made.
        if not (group["offload"] and group["use_muon"] and p in self.state):
            return None
        momentum = self.state[p].get("momentum_buffer")
        return None if momentum is None else momentum.data_ptr()

    def _make_plan(self, kinds: list[int]) -> None:
        matrices, planned, local, exchanged, summed, shards = [], [], [], [], [], {}
        for group, kind in zip(self.param_groups, kinds):
            if not group["use_muon"]:
                continue
            schedule = resolve_schedule(group["ns_coefficients"], group["ns_steps"])
            settings = schedule, group["ns_method"], work_dtype_of(group), group["adjust_lr_fn"]
            for name, p in zip(names_of(group), group["params"]):
                number = len(matrices)
                layout = layout_of(name, p, self._sharing.ranks)
                sheet = sheet_of(name, view_in_group(name, p, group), layout, this_rank())
                matrices.append((p, group, sheet))
                # A frozen parameter has no buffer yet; one that it gets later is like the parameter.
                buffer = self.state[p]["momentum_buffer"] if p in self.state else p
                kept_apart = (kind, group["offload"], None if layout is None else layout.mesh.members)
                of_matrices = Settings(*settings, kept_apart)
                own = Planned(name, local_part(p), local_part(buffer), {}, sheet.whole.scale, of_matrices)
                planned.append(own)
                frozen = not p.is_meta and p not in self.state
                here, sent = split_matrices(number, sheet)
                local.append(own._replace(matrices=here))
                if sent and not frozen:
                    shards[number] = sheet.shards
                    together = split_sums(own._replace(matrices=sent), sheet.shards) if self._sharing.sum_gram else {}
                    summed.append(own._replace(matrices=together))
                    exchanged.append(own._replace(matrices={m: sent[m] for m in sent if m not in together}))
        exchanges = plan_exchanges(exchanged, shards, this_rank(), self._sharing.chunk_bytes)
        sums = plan_sums(summed, shards, this_rank(), self._sharing.chunk_bytes)
        batches = plan_batches(local)
        hosted = plan_hosted(batches, matrices, self.state)
        claims = claims_of(self.param_groups, self._claim_of_all(), self._sharing.ranks, self.state)
        holders = {p: ranks for ranks, own in claims.items() for p in own.parameters}
        self._plan = Plan(matrices, planned, batches, exchanges, sums, claims, holders, hosted)

    def _claim_of_all(self) -> str:
        """Return what ranks must agree about besides parameters and groups, as one line."""
        return str(self._sharing)

    def _agree(self) -> None:
        """Raise ValueError unless all ranks that share parameters have made the same plan since they last agreed."""
        if self._compared:
            return
        # Without what schedulers move: a rank must not compare alone.
        claims = {ranks: (own.of_all, *own.lines) for ranks, own in self._plan.claims.items()}
        if claims != self._agreed:
            self._plan.check_agreement()
            self._agreed = claims
        self._compared = True


def _is_trained(p: Tensor) -> bool:
    # A frozen parameter whose gradient somebody has set is updated all the same.
    return p.requires_grad or p.grad is not None
