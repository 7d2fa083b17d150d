"""A step in a graph of `torch.compile`: one op, which takes the eager step when the graph runs.

The op finds its optimizer by a handle. Its arguments are what both the step and the graph may read and write:
parameters that have a gradient, their gradients and states. A backend may pass copies of them, or gradients that
`p.grad` does not show yet. So the step uses the arguments, and its results are written back into them. Everything else,
such as `lr`, is read from the optimizer when the op runs, so that a new value needs no new graph. (Torch 2.11 still
makes a second one when the rate first changes.)
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..kernels.formats import PLAIN_CLASSES
from ..kernels.native import define_operation, returns_nothing
from ..kernels.tracing import constant_while_traced
from ..parameters.rates import live_tensors

# Set on the optimizer inside a graph, these reach it only after the graph; torch 2.13 even loses them.
_READ_BY_STEPS = ("param_groups", "state", "grad_scale", "found_inf")


def handle_of(optimizer: Any) -> str:
    """Return a name of `optimizer` that no other object of this process has, also after its end."""
    # A text, because a graph could be traced for any number.
    handle = vars(optimizer).get("_handle") or str(next(muon_step_.numbers))
    muon_step_.optimizers[handle] = optimizer
    return handle


def is_traceable(attributes: Mapping[str, Any], closure: Any) -> bool:
    """Return whether `traced_step` can take the step of the optimizer with these `attributes`; for tracers.

    Otherwise the graph breaks here, which names what the op cannot do. A closure, and what QK-clip observes, are Python
    code that a tracer moves behind the op. Gradients that are released stay in the graph's arguments. Ranks that share
    parameters would send messages from inside of the op, among the graph's. Tensors of other classes, such as DTensor,
    have no rule for it. Offloaded momentum may still be on its way when the graph reads it. A graph's change of a
    tensor that holds `lr` may come after the op. Tracers know no gradient in another dtype than its parameter.
    """
    beyond = closure or attributes["_clip"] or attributes["_release_grads"] or attributes["_replica_ranks"]
    # In this order: when the tracer of torch 2.11 reads a group whose gradients have another dtype, it raises.
    untraceable = beyond or _has_untraceable_tensors(attributes["_handle"])
    if untraceable or any(group["offload"] for group in attributes["param_groups"]):
        torch._dynamo.graph_break(
            msg="Muon.step cannot be one op of the graph with a closure, qk_clip, release_grads, offload, lr or "
            "weight_decay in a tensor, parameters that ranks share, parameters of another class than Tensor and "
            "Parameter, or gradients in another dtype than their parameters"
        )
        return False
    return True


@constant_while_traced
def _has_untraceable_tensors(handle: str) -> bool:
    """Whether a parameter, a gradient's dtype or a live number is one that no graph takes.

    A constant for the tracer, which would make a graph for each value of `lr`, and break at what it does not know.
    """
    groups = muon_step_.optimizers[handle].param_groups
    parameters = [p for group in groups for p in group["params"]]
    unlike = any(p.grad is not None and p.grad.dtype != p.dtype for p in parameters)
    return unlike or not PLAIN_CLASSES.issuperset(map(type, parameters)) or any(map(live_tensors, groups))


def traced_step(attributes: Mapping[str, Any]) -> None:
    """Put the step of the optimizer with these `attributes` into the graph that is traced.

    Not the optimizer: a tracer that reads its `param_groups` sets `capturable` in them.
    """
    handle = attributes["_handle"]
    torch._dynamo.comptime.comptime(_break_graph_if_changed)
    parameters = [p for group in attributes["param_groups"] for p in group["params"]]
    # Because of `id`, a call with other parameters gets a graph of its own.
    [id(p) for p in parameters]
    # Without a gradient the op still writes a parameter, as backends drop an op that writes nothing.
    indices = [i for i, p in enumerate(parameters) if p.grad is not None] or [0]
    moved = [parameters[i] for i in indices]
    gradients = [p.grad for p in moved if p.grad is not None]
    with torch.no_grad():
        states = _tensors_of(attributes["state"].get(p, {}) for p in moved)
        muon_step_(handle, _places_in_state(handle), indices, moved, states, gradients)


@constant_while_traced
def _places_in_state(handle: str) -> str:
    """Return for each parameter the place of its entry in the state, or -1, in one text, as `handle_of` does.

    A graph finds the entries by these places, also after their order has changed.
    """
    optimizer = muon_step_.optimizers[handle]
    places = {p: place for place, p in enumerate(optimizer.state)}
    return " ".join(str(places.get(p, -1)) for group in optimizer.param_groups for p in group["params"])


def _break_graph_if_changed(context: Any) -> None:
    """Break the graph where the traced code has changed what steps read from the optimizer.

    The tracer makes such changes after the graph, so the op would come before them. It runs this function instead of
    calling it.
    """
    optimizer = muon_step_.optimizers[context.get_local("handle").as_python_constant()]
    groups, state = optimizer.param_groups, optimizer.state
    containers = [groups, *groups, *(group["params"] for group in groups), state, *state.values()]
    try:
        effects = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.side_effects
        known = effects.id_to_variable
        traced = [known[id(container)] for container in containers if id(container) in known]
        set_names = (names for of, names in effects.store_attr_mutations.items() if _stands_for(of, optimizer))
        are_set = any(name in names for names in set_names for name in _READ_BY_STEPS)
        changed = are_set or any(map(effects.is_modified, traced))
    except AttributeError:  # a torch with another tracer: a break is always right
        changed = True
    if changed:
        context.graph_break("what Muon.step reads from the optimizer has been changed in the same graph")


def _stands_for(variable: Any, value: Any) -> bool:
    """Whether a tracer's variable stands for a value."""
    return getattr(variable, "value", None) is value


def _tensors_of(entries: Iterable[Mapping[str, Any]]) -> list[Tensor]:
    return [value for entry in entries for value in entry.values() if isinstance(value, Tensor)]


def _take_step(
    handle: str,
    places: str,
    indices: Sequence[int],
    parameters: Sequence[Tensor],
    states: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> None:
    """Take a step of the parameters at `indices` of the optimizer, from and into the values of the arguments."""
    optimizer = muon_step_.optimizers[handle]
    parameters_of_optimizer = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.grad for p in parameters_of_optimizer]
    moved = [parameters_of_optimizer[i] for i in indices]
    entries, place_of = dict(enumerate(optimizer.state.values())), [int(place) for place in places.split()]
    present = [*moved, *_tensors_of(entries.get(place_of[i], {}) for i in indices)]
    if len(present) != len(parameters) + len(states):
        raise RuntimeError(
            f"a compiled step was traced with {len(parameters) + len(states)} tensors of parameters and state, and the "
            f"optimizer has {len(present)} now: compile the step again (torch._dynamo.reset())"
        )
    pairs = zip(present, [*parameters, *states])
    copies = [(place, value) for place, value in pairs if not value.is_set_to(place)]
    try:
        _set_gradients(parameters_of_optimizer, [None] * len(parameters_of_optimizer))
        _set_gradients(moved, gradients)
        for place, value in copies:
            place.copy_(value)
        optimizer._eager_step(None)
        for place, value in copies:
            value.copy_(place)
    finally:
        _set_gradients(parameters_of_optimizer, before)


def _set_gradients(parameters: Sequence[Tensor], gradients: Sequence[Any]) -> None:
    for p, gradient in zip(parameters, gradients):
        p.grad = gradient


muon_step_ = define_operation(
    "muon_step_",
    "(str handle, str places, SymInt[] indices, Tensor(a!)[] parameters, Tensor(b!)[] states, Tensor[] gradients)"
    " -> ()",
    {"default": _take_step, "meta": returns_nothing},
    tags=(torch.Tag.cudagraph_unsafe,),
)
# The optimizers by handle, and the next handle, are attributes of the op, because copies of this variant share it.
if "optimizers" not in vars(muon_step_):
    muon_step_.optimizers = weakref.WeakValueDictionary()
    muon_step_.numbers = itertools.count()
