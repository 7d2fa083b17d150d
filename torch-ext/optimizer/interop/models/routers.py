"""What modules show of layers whose names mislead: routers of experts, and hidden layers called gate or norm."""

from __future__ import annotations

import re
from typing import List, NamedTuple

from torch import nn

from ...parameters.roles import ROUTERS, role_by_name
from .output_heads import layer_inside

_EXPERTS = re.compile(r"experts|expert_?\d")


class Shown(NamedTuple):
    """Routers, and layers that are hidden ones in spite of their names."""

    routers: List[nn.Module]
    hidden: List[nn.Module]


def shown_by_modules(model: nn.Module) -> Shown:
    """Return the layers of `model` of which the modules beside them, or their classes, show what they are.

    A `gate` beside experts is a router, whatever its shape. Without experts, and beside a linear layer of its sizes, it
    is the gate of a gated layer, unless its name or that of a module around it is `router`. A linear layer is no norm.
    """
    shown = Shown([], [])
    for path, parent in model.named_modules():
        children, in_router = list(parent.named_children()), "router" in path.lower().split(".")
        held = (*children, *parent.named_parameters(recurse=False))
        has_experts = any(_EXPERTS.search(name.lower()) for name, _ in held)
        for name, child in children:
            if name.lower() in ROUTERS and has_experts:
                shown.routers.append(child)
            elif name.lower() in ROUTERS - {"router"} and not in_router and _has_partner(child, parent):
                shown.hidden.append(child)
            elif isinstance(layer_inside(child), nn.Linear) and _is_called_norm(name):
                shown.hidden.append(child)
    return shown


def _is_called_norm(name: str) -> bool:
    return (role_by_name(f"{name}.weight", (1, 1)) or "").startswith("norm")


def _has_partner(gate: nn.Module, parent: nn.Module) -> bool:
    """Whether a linear layer has another one of its sizes beside it."""
    layers = [layer_inside(child) for child in parent.children()]
    sizes = [(layer.in_features, layer.out_features) for layer in layers if isinstance(layer, nn.Linear)]
    layer = layer_inside(gate)
    return isinstance(layer, nn.Linear) and sizes.count((layer.in_features, layer.out_features)) > 1
