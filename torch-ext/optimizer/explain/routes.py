"""The rows of `explain()`: branch, reason, kernel and cost of each parameter, and a line for each exchange."""

from __future__ import annotations

import math
from itertools import chain
from typing import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..kernels.formats import dtype_name, torch_is_slow
from ..kernels.native import IS_PORTABLE
from ..kernels.products import NATIVE
from ..kernels.provenance import build_info
from ..kernels.speeds.machine import key_of
from ..kernels.speeds.measurements import all_failed
from ..parameters.advice import Uncut, advice, remarks, same_names, still_uncut, told_names, uncut_lines
from ..parameters.matrices import view_in_group
from ..parameters.names import named_parameters
from ..parameters.rates import fast_decay
from ..parameters.routing import Route, reason_of
from ..parameters.settings import Group, keeps_norm, multiplier_in_group
from ..parameters.state import State, has_remainder, state_tensors
from ..plan.batches import bytes_of_chain
from ..plan.gram_sums import sums_described
from ..plan.layout import local_part
from ..plan.matrix import Matrix, Parameter
from ..plan.plain_parts import plain_parts
from ..plan.plan import Plan, SharedWork
from ..rules.fallback_table import FALLBACK_KERNEL
from .table import Explanation
from .writing import bytes_text, effective_lr, shown_number

# The note about a variant without a compiled library.
_PORTABLE = (
    "portable operations: {variant} has no compiled library; each pass before and after the orthogonalization takes "
    "many of torch's operations, where a compiled one takes one (docs/platforms.md says how much longer they took)"
)

# The note about what `gram_float32` costs on a GPU, where torch multiplies as its setting for float32 says.
_FLOAT32_ON_GPU = (
    "gram_float32 multiplies the Gram matrices of {parameters} in float32. CUDA devices multiply at full float32 "
    "precision, at a far lower rate than in half precision. If torch.set_float32_matmul_precision allows TF32, they "
    "are faster, and the iteration restarts more often, because it would diverge otherwise"
)

# The note about torch's products in half precision on a CPU that has no instructions for them.
_HALF_ON_CPU = (
    "torch multiplies matrices of {parameters} in half precision, for which it has no instructions of this CPU. That "
    "may take many times as long as in float32"
)


def explanation_of(
    groups: Sequence[Group],
    plan: Plan,
    reasons: Mapping[Tensor, str],
    state: State,
    notes: Iterable[str],
    uncut: Iterable[Uncut],
) -> Explanation:
    """Return a row for each parameter of `groups`, a line for each exchange of their `plan`, and these `notes`.

    `state` is the optimizer's state by parameter. Frozen parameters have none and cost nothing. `uncut` is what
    `groups_for` could not find out.
    """
    planned, shared = iter(plan.matrices), plan.shared_work()
    rows, held = [], 0
    for group in groups:
        for name, p in named_parameters(group):
            # A parameter that a wrapper has put in the place of another one was not routed: its group decides.
            reason = reasons.get(p, reason_of(group))
            if group["use_muon"]:
                row = _with_work(route_in_group(name, p, reason, group), next(planned), shared)
            else:
                row = Route(name, tuple(p.shape), group["fallback"], reason, kernel=FALLBACK_KERNEL)
            kept = state.get(p, {})
            rows.append(_in_group(row, p, group, kept))
            held += sum(local_part(value).nbytes for value in kept.values() if isinstance(value, Tensor))
    lines = [
        *map(str, plan.exchanges),
        *map(sums_described, plan.sums),
        *notes,
        *_memory(plan),
        *_shared_products(plan),
        *_slow_products(plan),
        *_left_out(plan),
    ]
    lines += [*advice(rows, told_names(groups)), *same_names(groups, groups), *plain_parts(groups), *fast_decay(groups)]
    lines += [*remarks(rows), *uncut_lines(still_uncut(uncut, groups))]
    if IS_PORTABLE:
        lines.append(_PORTABLE.format(variant=build_info().variant or "this build"))
    if plan.terms:
        lines.insert(0, f"this rank holds {bytes_text(held)} of the state")
    return Explanation(rows, lines)


def route_in_group(name: str, p: Tensor, reason: str, group: Group) -> Route:
    """Return the route of a parameter that Muon updates, with the settings of its group."""
    view = view_in_group(name, p, group)
    reason = reason if str(view) == "x".join(map(str, p.shape)) else f"{reason}: {view}"
    multipliers = dict.fromkeys(multiplier_in_group(group, *shape, view.scale) for shape in dict.fromkeys(view.shapes))
    return Route(name, tuple(p.shape), "muon", reason, len(view.shapes), tuple(multipliers))


def _with_work(row: Route, matrices: Sequence[Matrix], shared: Mapping[tuple[int, int], SharedWork]) -> Route:
    """Return the row of the parameter with these matrices, completed by owner, kernel and FLOPs."""
    parameter, work = matrices[0].parameter, [shared[matrix.key] for matrix in matrices if matrix.key in shared]
    owners = {each.owner for each in work} or {None}
    kernel = next((each.described for each in work if each.described), matrices[0].iteration.explained)
    kernel += str(parameter.equalization) + _state_of(parameter)
    owner = owners.pop() if len(owners) == 1 else "several"
    return row._replace(kernel=kernel, owner=owner, flops=sum(matrix.flops for matrix in matrices))


def _state_of(parameter: Parameter) -> str:
    """Return what a parameter of Muon has besides momentum of its dtype: second moments, or 8 bits."""
    moments = parameter.moments_view
    balanced = "" if moments is None else f", {'rows' if moments.cols == 1 else 'columns'} balanced by second moments"
    return balanced + (", momentum in 8 bits" if parameter.momentum_dtype == torch.int8 else "")


def _memory(plan: Plan) -> list[str]:
    """Return a note for each GPU: the most memory that a step takes there for matrices that no other rank works on."""
    most: dict[torch.device, int] = {}
    for batches in plan.local_chains():
        device = batches[0].device
        if device.type not in ("cpu", "meta"):
            most[device] = max(most.get(device, 0), bytes_of_chain(batches))
    return [
        f"memory: for matrices a step takes at any time at most about {bytes_text(count)} of {device} beside "
        "parameters, gradients and state (an estimate)"
        for device, count in most.items()
    ]


def _shared_products(plan: Plan) -> list[str]:
    """Return a note for each short side whose matrices share m x m products with those of other batches."""
    shared: dict[int, list[int]] = {}
    for batches in plan.chains():
        if len(batches) > 1:
            count = sum(len(batch.matrices) for batch in batches)
            shared.setdefault(min(batches[0].packed_shape), []).append(count)
    return [
        f"{sum(counts)} matrices with a short side of {m} share their {m} x {m} products"
        + (f", in {len(counts)} chains" if len(counts) > 1 else "")
        for m, counts in shared.items()
    ]


def _slow_products(plan: Plan) -> list[str]:
    """Return a note for each kind of products that are far slower than others, with the parameters that have them."""
    of_sums = [batch.first for batches in plan.sums for batch in batches]
    slow: dict[str, dict[int, str]] = {}
    for matrix in chain(*plan.matrices, of_sums):
        for note in _notes_on_products(matrix):
            slow.setdefault(note, {})[matrix.parameter.number] = matrix.parameter.name
    return [note.format(parameters=_such_as(list(names.values()))) for note, names in slow.items()]


def _notes_on_products(matrix: Matrix) -> Iterator[str]:
    """Yield a note for each precision of the products that the device multiplies slowly."""
    iteration, parameter = matrix.iteration, matrix.parameter
    device, dtype = parameter.device.type, iteration.work_dtype
    if device == "cuda" and iteration.method == "gram_float32" and iteration.chain_dtype != dtype:
        yield _FLOAT32_ON_GPU
    if device == "cpu" and iteration.products.affine is not NATIVE.affine and torch_is_slow(dtype):
        yield _HALF_ON_CPU


def _left_out(plan: Plan) -> list[str]:
    """Return a note for each kernel of which candidates have failed on this machine in a dtype of the plan."""
    # Two GPUs of a kind have one key.
    used = dict.fromkeys(
        (key_of(m.parameter.device), dtype_name(m.iteration.work_dtype)) for m in chain(*plan.matrices)
    )
    return [
        f"left out, since they failed on this machine: {', '.join(whys)} of {kernel} in {dtype} "
        f"({'; '.join(dict.fromkeys(whys.values()))})"
        for key, dtype in used
        for (kernel, failed_dtype), whys in all_failed(key).items()
        if failed_dtype == dtype and whys
    ]


def _such_as(names: Sequence[str]) -> str:
    return f"{len(names)} parameters, such as {names[0]}," if len(names) > 1 else names[0]


def _in_group(row: Route, p: Tensor, group: Group, kept: Mapping[str, Tensor]) -> Route:
    """Return the row completed by the current settings of the parameter's group, and by the state `kept` for it."""
    frozen = not kept and not (p.is_meta and p.requires_grad)  # on meta no parameter has its state yet
    kernel = row.kernel + _decay_of(group)
    if has_remainder(p, group):
        kernel += ", float32 in two halves"
    tensors = {} if frozen else state_tensors(row.name, p, group)
    return row._replace(
        kernel=kernel,
        lr=effective_lr(group),
        weight_decay=None if keeps_norm(group) else shown_number(group["weight_decay"]),
        # Momentum that was loaded or imported may keep its dtype.
        state_bytes=sum(
            math.prod(kind.shape or ()) * (kept[key].dtype if key in kept else kind.dtype).itemsize
            for key, kind in tensors.items()
        ),
        flops=None if frozen else row.flops,
    )


def _decay_of(group: Group) -> str:
    if keeps_norm(group):
        return ", norm kept without decay (Hyperball, experimental)"
    return "" if group["decay_mode"] == "decoupled" else f", {group['decay_mode']} decay"
