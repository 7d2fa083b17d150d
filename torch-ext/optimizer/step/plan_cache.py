"""The plan and the workspace that steps follow, kept until something changes that they depend on."""

from __future__ import annotations

from typing import Any, ContextManager, MutableMapping, Optional, Sequence

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..kernels.formats import float32_roundoffs
from ..kernels.provenance import build_info
from ..kernels.speeds.measurements import work_among_ranks
from ..parameters.changed_settings import are_same, compared_settings, make_live_numbers_plain_, make_plain_
from ..parameters.checks import check_fake_mode
from ..parameters.names import named_parameters
from ..plan.exchange_options import ExchangeOptions
from ..plan.layout import groups_of
from ..plan.plan import Plan, make_plan
from ..plan.process_groups import Ranks, world_size
from ..plan.terms import BETWEEN
from ..qk_clip.clip import QKClip
from .agreement.rank_agreement import RankAgreement
from .gradients import Gradients
from .graphs import UpdateGraphs
from .known_state import KnownState
from .premises import Premises
from .state import bring_states_, check_memory
from .state_changes import StateChanges
from .workspace import Workspace, dependencies


class PlanCache:
    """A plan, the workspace for it, and what each was made for; either is made anew when that has changed.

    A new plan is also told to `clip`, to `agreement` and to `graphs`, which keep something of the last one.
    """

    def __init__(
        self,
        exchange: ExchangeOptions,
        replica_ranks: Optional[Ranks],
        release_grads: bool,
        clip: Optional[QKClip],
        agreement: RankAgreement,
        graphs: UpdateGraphs,
    ):
        self.plan = Plan()
        self.premises: Optional[Premises] = None  # of the plan
        self.workspace: Optional[Workspace] = None
        self._known_state: Optional[KnownState] = None  # of the plan
        self._is_placed = True  # whether the state is where steps need it
        self._state_changes = StateChanges()  # by plans that other ranks have not agreed with yet
        self._reasons_of_absent: MutableMapping[Tensor, str] = WeakIdKeyDictionary()  # of parameters in no group
        self._checked_settings: Sequence[Any] = ()
        # By the `id` of a group's list of parameters: the list, and whether the group was made `capturable`.
        self._capturable: dict[int, tuple[list[Tensor], bool]] = {}
        self._workspace_for: Sequence[Any] = ()
        self._exchange, self._replica_ranks, self._release_grads = exchange, replica_ranks, release_grads
        self._clip, self._agreement, self._graphs = clip, agreement, graphs

    def refresh_(
        self,
        groups: Sequence[dict[str, Any]],
        state: dict[Tensor, Any],
        reasons: dict[Tensor, str],
        moving: bool = True,
    ) -> Gradients:
        """Bring groups, state, plan and workspace in line with each other; each only if something changed.

        Unless `moving`, state that somebody has parked on another device stays there, and the next step brings it back.
        Wrappers and `module.to()` replace or change parameters silently, so every step checks. `reasons`, for the
        branches of parameters, go over to those that have taken their place. Returns the gradients of all parameters.
        Raises ValueError or TypeError for settings that cannot work, and RuntimeError under a FakeTensorMode that
        parameters do not belong to, before anything is changed.
        """
        work_among_ranks(world_size() > 1)  # then measurements that other ranks may lack do not count
        params = [p for group in groups for p in group["params"]]
        check_fake_mode(params)
        changed = self._check_settings_(groups)
        gradients = Gradients(params)
        seen = params, gradients.absent, groups
        known = self.premises is not None and self.premises.hold(*seen) and (self._is_placed or not moving)
        if not known or not self._known_state.holds(state, groups):
            premises, before = Premises(*seen), self.premises
            premises.check_names(before)
            self._make_plan_(groups, state, moving)
            self.premises, self._known_state, self._is_placed = premises, KnownState(state), moving
            self._bring_reasons_(reasons, before)
            changed = True
        elif self.premises.have_moved(params):  # as when weights are tied by their `.data`
            check_memory(groups, state)
            self.premises.remember_places(params)
        if changed:
            self._graphs.drop_unused(self.plan.chains(), groups)
        if self._is_placed:
            self._bring_workspace(groups, state)
        return gradients

    def restore_capturable_(self, groups: Sequence[dict[str, Any]]) -> None:
        """Give each group, in place, the `capturable` that it had when it was first seen here.

        The tracer of torch.compile sets it in its copy of each group, and writes a copy back that the function changes.
        """
        seen = {id(group["params"]): (group["params"], group["capturable"]) for group in groups}
        self._capturable = {key: self._capturable.get(key, new) for key, new in seen.items()}
        for group in groups:
            _, group["capturable"] = self._capturable[id(group["params"])]

    def undone_unless_agreed_(self, state: dict[Tensor, Any]) -> ContextManager[None]:
        """Return a context in which ranks compare plans: if it raises, what plans changed of `state` is undone."""
        return self._state_changes.undone_on_error_(state)

    def forget(self) -> None:
        """Have no plan and no workspace until the next refresh."""
        self.synchronize()
        self.premises, self.plan, self.workspace = None, Plan(), None

    def synchronize(self) -> None:
        """Wait until all offloaded momentum is back in host memory."""
        if self.workspace is not None:
            self.workspace.synchronize()

    def _check_settings_(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Make the settings of groups plain in place, and return whether any was changed that no scheduler sets."""
        self.restore_capturable_(groups)
        make_live_numbers_plain_(groups)
        if are_same(compared_settings(groups), self._checked_settings):
            return False
        make_plain_(groups)
        self._checked_settings = compared_settings(groups)
        return True

    def _make_plan_(self, groups: Sequence[dict[str, Any]], state: dict[Tensor, Any], moving: bool) -> None:
        """Make a plan, after bringing `state` in line with groups in place; if that raises, `state` is as before."""
        self.forget()
        named = [(group, *pair) for group in groups for pair in named_parameters(group)]
        self._state_changes.bring_back_([p for *_, p in named], state)
        is_new = self._known_state is None and not any(entry for p, entry in state.items() if isinstance(p, Tensor))
        with self._state_changes.recorded(state):
            bring_states_(groups, state, self._state_changes.away, self._replica_ranks, moving)
            self.plan = make_plan(groups, state, self._exchange, self._replica_ranks, self._common_line())
            self._agreement.follow(self.plan.terms, groups_of(p for *_, p in named))
            if self._clip is not None:
                self._clip.follow([name for _, name, _ in named], [p for _, _, p in named], self._replica_ranks)
                self._clip.check_rows({name for group, name, _ in named if group["transposed"]})
        # The first plan of a new optimizer makes its state: nothing to come back to. A loaded state may be converted.
        if is_new or not self.plan.terms:
            self._state_changes.forget()

    def _bring_reasons_(self, reasons: dict[Tensor, str], before: Optional[Premises]) -> None:
        """Bring `reasons` in line with the premises; those of parameters that are in no group wait for them."""
        waiting = {p: reason for p, reason in self._reasons_of_absent.items() if p not in reasons}
        known = {**reasons, **waiting}
        reasons.clear()
        reasons.update(self.premises.reasons(known, before))
        self._reasons_of_absent.update((p, reason) for p, reason in known.items() if p not in reasons)

    def _common_line(self) -> str:
        """Return what ranks compare besides parameters and settings."""
        clip = "no qk_clip" if self._clip is None else f"qk_clip {self._clip.settings}"
        build = build_info()
        common = (
            "the optimizer",
            f"commit {build.commit}, changed {build.dirty}, of version {build.version}",
            f"{self._exchange}",
            f"release_grads={self._release_grads}",
            clip,
            f"float32 products rounded by {float32_roundoffs()}",
        )
        return BETWEEN.join(common)

    def _bring_workspace(self, groups: Sequence[dict[str, Any]], state: dict[Tensor, Any]) -> None:
        """Make a workspace, unless the one that is there fits."""
        now = dependencies(groups, state)
        if self.workspace is None or now != self._workspace_for or not self.workspace.finds_states_in(state):
            self.synchronize()
            self.workspace = Workspace(self.plan, groups, state, self._release_grads)
            self._workspace_for = now
