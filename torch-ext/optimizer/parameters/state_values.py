"""Checks of the values in a state: whether steps can compute with them, whatever the settings of the group."""

from __future__ import annotations

import math
from numbers import Real
from reprlib import repr as shortened
from typing import Any, Mapping

import torch
from torch import Tensor

from ..iteration import DTYPES
from ..kernels.formats import PLAIN_CLASSES, shown
from ..kernels.tracing import is_fake, lacks_values
from .setting_values import number_in
from .state import BUFFER, COUNT, KEYS


def check_values(state: Any, name: str, p: Tensor) -> None:
    """Raise TypeError or ValueError unless steps can compute with the saved `state` of `p`.

    Keys of other packages may hold anything but a tensor without values, such as one on meta, which torch cannot move
    to the device of `p`.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"the state of {name} must be a dict of tensors by key, got {_shown(state)}")
    for key, value in state.items():
        what = f"state {key} of {name}"
        if isinstance(value, Tensor) and lacks_values(value):
            if not lacks_values(p):
                raise ValueError(
                    f"{what} has no values: load the file onto a device, outside of a FakeTensorMode, got "
                    f"{_shown(value)}"
                )
        elif key in KEYS and isinstance(value, Mapping) and not value:  # what torch puts there if the file lacks it
            raise ValueError(
                f"the file has no {key} of {name}, which this optimizer needs: where it was saved, another branch "
                "updated this parameter, or its group had other settings. Make the groups as they were"
            )
        elif key == COUNT:
            _check_count(what, value)
        elif key in KEYS:
            _check_tensor(what, value, key)


def check_tensors(state: Mapping[str, Any], name: str, p: Tensor) -> None:
    """Raise TypeError or ValueError unless steps can compute with the tensors in the `state` of `p`.

    Users can put others there between two steps. The values of counts are not read: that would wait for the device.
    """
    for key in KEYS:
        if key not in state:
            continue
        what, value = f"state {key} of {name}", state[key]
        _check_tensor(what, value, key)
        if lacks_values(value) and not lacks_values(p):
            raise ValueError(f"{what} has no values: put a tensor with values there, got {_shown(value)}")
        if value.is_inference():
            raise ValueError(
                f"{what} was made under torch.inference_mode, so that no step could change it: put its .clone() there, "
                "made outside"
            )
        if key == COUNT and value.numel() != 1:
            raise ValueError(f"{what} must have one element, got {_shown(value)}")


def _check_tensor(what: str, value: Any, key: str) -> None:
    dtypes = (*DTYPES, *{BUFFER: (torch.int8,), COUNT: (torch.int32, torch.int64)}.get(key, ()))
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} must be a tensor, got {_shown(value)}")
    if value.layout != torch.strided or value.dtype not in dtypes:
        *first, last = map(str, dtypes)
        raise ValueError(f"{what} must be a dense tensor of {', '.join(first)} or {last}, got {_shown(value)}")


def _check_count(what: str, value: Any) -> None:
    """Raise unless `value` is a number that can count steps, or a tensor of one element with such a number."""
    number = value
    if isinstance(value, Tensor) and value.numel() == 1 and value.layout == torch.strided:
        # Other kinds of tensors, such as those of a FakeTensorMode, may have no number at hand.
        number = number_in(value) if type(value) in PLAIN_CLASSES else 0
    if not isinstance(number, Real) or isinstance(number, bool):
        raise TypeError(f"{what} must be a number or a tensor of one, got {_shown(value)}")
    if not 0 <= number < math.inf:
        raise ValueError(f"{what} must be at least 0 and below inf, got {number}")


def _shown(value: Any) -> str:
    """Return what an error shows of a value: the kind of a tensor, and the beginning of anything else."""
    if not isinstance(value, Tensor):
        return shortened(value)
    kind = "a fake tensor " if is_fake(value) else ""
    return f"{kind}{shown(value)} on {value.device}"
