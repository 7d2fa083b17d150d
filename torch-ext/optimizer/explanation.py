"""What an optimizer says of itself: where each parameter goes and why, what it runs on, and what is exchanged."""

from __future__ import annotations

from typing import Mapping, Sequence

from torch import Tensor

from .claims import Group
from .distributed.plan import Matrix
from .distributed.summed import described
from .param_groups import names_of
from .routing import Explanation, Route, muon_route
from .updates import Plan


def explanation_of(groups: Sequence[Group], plan: Plan, reasons: Mapping[Tensor, str]) -> Explanation:
    """Return a row for each parameter of `groups`, and a line for each exchange of their `plan`."""
    muons, summed = iter(enumerate(plan.planned)), plan.summed()
    owners = {**plan.owners(), **dict.fromkeys(summed, "all")}
    rows = []
    for group in groups:
        for name, p in zip(names_of(group), group["params"]):
            # A parameter that a wrapper has put in another's place was not routed: its group says where it is.
            reason = reasons.get(p, "use_muon")
            if not group["use_muon"]:
                kernel = "torch._fused_adamw_" if group["fallback"] == "adamw" else "torch._foreach_*"
                rows.append(Route(name, tuple(p.shape), group["fallback"], reason, 0, None, None, kernel))
                continue
            number, planned = next(muons)
            view = plan.matrices[number][2].whole
            route = muon_route(name, p, reason, view, group["adjust_lr_fn"])
            matrices = [Matrix(number, i) for i in range(route.matrices)]
            own = {owners[matrix] for matrix in matrices if matrix in owners} or {None}
            kernel = next((str(summed[m]) for m in matrices if m in summed), str(planned.iteration(view.shapes[0])))
            rows.append(route._replace(kernel=kernel, owner=own.pop() if len(own) == 1 else "several"))
    return Explanation(rows, [*map(str, plan.exchanges), *map(described, plan.sums)])
