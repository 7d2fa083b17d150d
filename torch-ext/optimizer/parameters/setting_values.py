"""Checks of single settings: each `check(key, value)` returns the value in plain form, or raises and names the key."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from ..iteration import DTYPES, check_work_dtype
from ..kernels.formats import PLAIN_CLASSES, dtype_name, is_dtensor
from ..learning_rate import check_adjustment
from ..schedules import without_arrays
from .argument_checks import check_takes
from .sequences import is_sequence

MOMENTUM_DTYPES = (None, "float32", "float64", "bfloat16", "float16", "int8")


def plain_number_or_tensor(key: str, value: Any) -> float | Tensor:
    """Return a number as a float, and a one-element float32 or float64 tensor unchanged; `rates` checks its device.

    Raises ValueError for a tensor of the CPU that holds a number which is not in [0, inf), and TypeError for a DTensor.
    """
    if not isinstance(value, Tensor):
        return plain_number(key, value)
    if is_dtensor(value):
        raise TypeError(f"{key} must be a number or a plain tensor, got a DTensor: write value.full_tensor()")
    if value.numel() != 1 or value.dtype not in (torch.float32, torch.float64) or value.is_meta:
        got = f"{tuple(value.shape)} {value.dtype} on {value.device}"
        raise ValueError(
            f"{key} must be a number or a float32 or float64 tensor of one element that has a value, got {got}"
        )
    number = number_at_hand(value)
    if number is not value:
        plain_number(key, number)
    return value


def number_at_hand(value: Any) -> Any:
    """Return the number in a float32 or float64 tensor of the CPU, and anything else as it is.

    Of a tensor on a GPU a step may not read the number, because it would wait for the GPU.
    """
    is_at_hand = type(value) in PLAIN_CLASSES and value.device.type == "cpu" and value.numel() == 1
    if not is_at_hand or value.dtype not in (torch.float32, torch.float64):
        return value
    return number_in(value)


def number_in(value: Tensor) -> Any:
    """Return the number in a tensor with one element; the host waits for its device."""
    number = value.tolist()  # not `item()`, which is an operation: a FakeTensorMode around this refuses it
    while isinstance(number, list):
        (number,) = number
    return number


def plain_number(key: str, value: Any, high: float = math.inf) -> float:
    """Return a number in [0, high) as a float."""
    if not isinstance(value, Real) or isinstance(value, bool):
        text = ": write it without quotes; YAML reads 1e-3 as text, and 1.0e-3 as a number"
        also = "; groups may have other ones, and params come first" if key == "lr" else ""
        raise TypeError(f"{key} must be a number, got {value!r}{text if isinstance(value, str) else also}")
    try:
        number = float(value)
    except OverflowError:  # of a whole number above all floats
        number = math.inf
    if not 0 <= number < high:
        raise ValueError(f"{key} must be at least 0 and below {high}, got {value}")
    return number


def plain_positive(key: str, value: Any) -> float:
    """Return a number in (0, inf) as a float."""
    number = plain_number(key, value)
    if number == 0:
        raise ValueError(f"{key} must be above 0, got {value}")
    return number


def plain_below_one(key: str, value: Any) -> float:
    """Return a number in [0, 1) as a float."""
    return plain_number(key, value, 1.0)


def plain_betas(key: str, value: Any) -> tuple[float, ...]:
    """Return two numbers in [0, 1) as floats."""
    if not is_sequence(value) or len(value) != 2:
        raise ValueError(f"{key} must be two numbers, got {value!r}")
    return tuple(plain_below_one(f"{key}[{i}]", beta) for i, beta in enumerate(value))


def flag(key: str, value: Any) -> bool:
    """Return `value`; TypeError unless it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{key} must be True or False, got {value!r}")
    return value


def optional(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """Return the check of a value that may also be None."""
    return lambda key, value: None if value is None else check(key, value)


def one_of(choices: tuple[Optional[str], ...]) -> Callable[[str, Any], Any]:
    """Return the check of a value that must be one of `choices`."""

    def plain(key: str, value: Any) -> Any:
        if not isinstance(value, (str, type(None))) or value not in choices:
            raise ValueError(f"{key} must be one of {', '.join(map(str, choices))}, got {value!r}")
        return value

    return plain


def plain_names(key: str, value: Any) -> tuple[str, ...]:
    """Return names, none of them empty, as a tuple."""
    if not is_sequence(value) or not all(isinstance(name, str) and name for name in value):
        raise TypeError(f"{key} must be a tuple or list of names, got {value!r}")
    return tuple(value)


def plain_coefficients(key: str, value: Any) -> Any:
    """Return a preset's name as it is, and nested sequences as tuples of floats; `resolve_schedule` checks both."""
    value = without_arrays(value)
    if hasattr(value, "__iter__") and not isinstance(value, str):
        return tuple(plain_coefficients(key, item) for item in value)
    return float(value) if isinstance(value, Real) else value


def plain_count(key: str, value: Any) -> Any:
    """Return a whole number as an int, and anything else as it is; `resolve_schedule` checks both."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def plain_split_rows(key: str, value: Any) -> tuple[int, ...]:
    """Return row counts as a tuple of ints; TypeError or ValueError for anything else."""
    if not is_sequence(value) or not all(isinstance(count, Integral) for count in value):
        raise TypeError(f"{key} must be whole numbers of rows, got {value!r}")
    if not value or min(value) < 1 or any(isinstance(count, bool) for count in value):
        raise ValueError(f"{key} must be numbers of rows of at least 1, got {value!r}")
    return tuple(int(count) for count in value)


def plain_rounding_step(key: str, value: Any) -> int:
    """Return the number of steps for which a group has drawn seeds as an int."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{key} must be a whole number, got {value!r}")
    if value < 0:
        raise ValueError(f"{key} must be at least 0, got {value}")
    return int(value)


def plain_adjustment(key: str, value: Any) -> Any:
    """Return the name of a multiplier, or a function that computes one, as it is."""
    check_adjustment(value)
    if callable(value):
        check_takes(key, value, "rows", "cols")
    return value


def plain_dtype(key: str, dtype: torch.dtype | str) -> torch.dtype:
    """Return a dtype, which may be given by its name."""
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype):
        names = ", ".join((*map(dtype_name, DTYPES), *(("int8",) if key == "momentum_dtype" else ())))
        raise ValueError(f"{key} must be a torch.dtype or its name, such as {names}, got {dtype!r}")
    return resolved


def plain_work_dtype(key: str, dtype: torch.dtype | str | None) -> Optional[str]:
    """Return the name of a dtype, given as such or by name, None for None; ValueError if it is not a work dtype."""
    return None if dtype is None else dtype_name(check_work_dtype(plain_dtype(key, dtype), key=key))


def plain_momentum_dtype(key: str, dtype: torch.dtype | str | None) -> Optional[str]:
    """Return the name of a dtype, None for None; ValueError for one that momentum cannot have."""
    name = None if dtype is None else dtype_name(plain_dtype(key, dtype))
    if name not in MOMENTUM_DTYPES:
        raise ValueError(f"{key} must be one of {', '.join(map(str, MOMENTUM_DTYPES))}, got {dtype!r}")
    return name
