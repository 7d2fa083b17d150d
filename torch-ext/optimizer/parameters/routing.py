"""Routing: which parameters Muon updates, which ones AdamW updates, and why."""

from __future__ import annotations

import math
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Optional, Sequence, Union

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..kernels.user_warnings import warn_user
from .argument_checks import check_takes
from .checks import check_matrix
from .roles import lora_factor, role_by_name
from .synonyms import wish_of

# The reason for parameters that may be stacks of matrices or convolutions.
UNDECIDED = "stack_or_convolution"
# Objections to shapes that are not matrices, whether read as stacks or as convolutions.
_NO_MATRIX = ("insufficient_dims", "leading_unit_dims")
MIN_SIDE = 4
MAX_ASPECT = 128.0

IsMuon = Callable[[str, Tensor], Optional[bool]]


class Route(NamedTuple):
    """A row of `explain()`: what happens to a parameter. Its `branch` is `muon` or its `fallback`.

    Fields that do not apply are None.
    """

    name: str
    shape: tuple[int, ...]
    branch: str
    reason: str
    matrices: int = 0
    multipliers: tuple[float, ...] = ()  # the different ones of its matrices, in their order
    # A rank; `several` if its matrices have several owners, `all` if ranks sum its Gram matrices; None: this process.
    owner: Union[int, str, None] = None
    kernel: Optional[str] = None
    lr: Union[float, str, None] = None  # the value at the call; a string for a tensor on a GPU
    weight_decay: Union[float, str, None] = None  # the same
    state_bytes: Optional[int] = None  # of the whole tensor's state
    flops: Optional[float] = None  # of its orthogonalization in one step, an estimate

    @property
    def multiplier(self) -> Optional[float]:
        """The multiplier of its first matrix; None if it has none."""
        return next(iter(self.multipliers), None)

    @property
    def elements(self) -> int:
        """How many numbers the parameter has."""
        return math.prod(self.shape)


def unique_parameters(
    params: Iterable[Union[Tensor, tuple[str, Tensor]]], first: int = 0
) -> list[tuple[list[str], Tensor]]:
    """Return each parameter once, with all its names; unnamed parameters are called `param_<first>` and so on.

    Warns if an unnamed parameter comes twice. Raises TypeError for anything but a tensor or a pair of name and tensor,
    and ValueError for nested tensors and for a parameter of a lazy module.
    """
    aliases: dict[Tensor, list[str]] = {}
    unnamed = []
    for i, entry in enumerate(params, first):
        named = isinstance(entry, (tuple, list)) and len(entry) == 2
        name, p = entry if named else (f"param_{i}", entry)
        if not isinstance(name, str) or not isinstance(p, Tensor):
            got = f"{_kind_of(entry)} at position {i - first}"
            parts = entry if isinstance(entry, (tuple, list)) else (entry,)
            got += ": write named_parameters() of it" if any(isinstance(part, nn.Module) for part in parts) else ""
            got += ": put the others into a group, too, or take their `params`" if isinstance(entry, dict) else ""
            raise TypeError(f"params must be tensors or (name, tensor) pairs, got {got}")
        if p.is_nested:
            raise ValueError(
                f"parameters must be dense tensors, {name} is a nested one: give its parts, each with a name"
            )
        if is_lazy(p):
            raise ValueError(
                f"{name} has no shape yet, because its module is lazy: run the model once before its optimizer is made"
            )
        unnamed += [] if named else [p]
        aliases.setdefault(p, []).append(name)
    if len(set(unnamed)) < len(unnamed):
        warn_user("got a parameter group with duplicate parameters: each is optimized once")
    return [(names, p) for p, names in aliases.items()]


def _kind_of(entry: Any) -> str:
    """Return the type of an entry as a text, with those of its parts if it may be meant as a pair."""
    kind = type(entry).__name__
    if not isinstance(entry, (tuple, list)) or not entry:
        return kind
    return f"a {kind} of {', '.join(type(part).__name__ for part in entry[:3])}{', ...' if len(entry) > 3 else ''}"


def check_is_muon(is_muon: Any) -> None:
    """Raise TypeError unless `is_muon` is a function of two arguments or None."""
    if is_muon is not None and not callable(is_muon):
        raise TypeError(
            f"is_muon must be a function of name and parameter, or None, got {is_muon!r}: to choose for a whole group "
            "write use_muon in it"
        )
    if is_muon is not None:
        check_takes("is_muon", is_muon, "name", "parameter")


def decide(
    names: Sequence[str], p: Tensor, is_muon: Optional[IsMuon] = None, stack: Optional[bool] = False
) -> tuple[str, str]:
    """Return the branch, `muon` or `adamw`, and the reason; `names` are all the names of a tied parameter.

    `is_muon` decides first, then the parameter's attribute `use_muon`, then shapes and names. For a `stack` of matrices
    (..., rows, cols) the shape of one matrix counts. If `stack` is None, the parameter may be a stack or a convolution:
    it goes to AdamW, with the reason `UNDECIDED` if Muon could update it in one of the two readings. Raises TypeError
    for another answer of `is_muon`, and ValueError if Muon is asked to update something that is not a matrix.
    """
    verdict, reason = None if is_muon is None else is_muon(names[0], p), "is_muon"
    if verdict is None:
        verdict, reason = wish_of(p), "use_muon"
    if not isinstance(verdict, (bool, type(None))):  # a tensor of several elements cannot be compared with True
        raise TypeError(
            f"is_muon must return True, False or None (routing decides), got {verdict!r}, a {type(verdict).__name__}"
        )
    if verdict is not None:
        if verdict:
            check_matrix(names[0], p)
        return ("muon" if verdict else "adamw"), reason
    shape = tuple(p.shape)
    # A stack of no matrices, as of a rank without experts, is none.
    readings = (shape,) if 0 in shape else {True: (shape[-2:],), False: (shape,), None: (shape, shape[-2:])}[stack]
    lora = lora_factor(names[0])
    objections = [objection_to(reading, math.inf if lora else MAX_ASPECT) for reading in readings]
    if objections[0] in _NO_MATRIX:
        return "adamw", objections[0]
    for name in names:  # before the sides, so that a long table is reported as a table
        role = role_by_name(name, readings[0], bool(stack))
        if role is not None:
            return "adamw", role
    if None not in objections:
        return "adamw", objections[0]
    return ("adamw", UNDECIDED) if stack is None else ("muon", lora or "matrix")


def reason_of(group: Mapping[str, Any]) -> str:
    """Return the reason for a branch that the group itself chose: its `reason`, or `use_muon` with its `role`."""
    default = f"use_muon: {group['role']}" if "role" in group else "use_muon"
    return str(group.get("reason", default))


def objection_to(shape: tuple[int, ...], max_aspect: float) -> Optional[str]:
    """Return the rule by which a parameter of this shape is not worth orthogonalizing, None if it is.

    Its shorter side must be at least `MIN_SIDE`, the longer at most `max_aspect` times that. Shapes of more than two
    dimensions count as (out, product of the rest). The rules and their names are those of timm,
    https://github.com/huggingface/pytorch-image-models, timm/optim/muon.py.
    """
    if len(shape) < 2 or sum(size > 1 for size in shape) < 2:
        return "insufficient_dims"
    if shape[0] == 1 or shape[1] == 1:
        return "leading_unit_dims"
    short, long = sorted((shape[0], math.prod(shape[1:])))
    if short < MIN_SIDE:
        return f"min_dim_too_small:{short}"
    return f"extreme_aspect_ratio:{long / short:.1f}" if long / short > max_aspect else None
