"""The public surface of a loaded build, as one line of text for each name that users may write or store."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.nn import Parameter

# Settings that add state, and the dtype of parameters that have it.
STATES = (
    ({}, torch.float32),
    ({"momentum_dtype": "int8"}, torch.float32),
    ({"second_moment": "rows"}, torch.float32),
    ({"master_weights": "split"}, torch.bfloat16),
)
PLAIN = (bool, int, float, str, tuple, type(None))


def surface(kernel: ModuleType) -> dict[str, str]:
    """Return what each public name of a loaded build is.

    Names are `orthogonalize` (all of `__all__`, and those of `compat`), `Muon(lr)` for arguments, `Muon.step` for
    methods, `ops.descend_` for compiled and registered operations, `group["lr"]`, `state["momentum_buffer"]`, and
    `STATE_FORMAT`. A line changes if code written for the name before might not work after.
    """
    lines = dict(line for name in sorted(kernel.__all__) for line in lines_of(name, getattr(kernel, name)))
    lines |= {f"ops.{name}": schema for name, schema in sorted(operations(kernel).items())}
    lines |= {f'group["{key}"]': line for key, line in sorted(group_keys(kernel).items())}
    lines |= {f'state["{key}"]': line for key, line in sorted(state_keys(kernel).items())}
    return {**lines, "STATE_FORMAT": str(kernel.parameters.state.STATE_FORMAT)}


def lines_of(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the lines of one public name: its own, and those of its arguments and members."""
    if isinstance(value, ModuleType):
        yield name, "module"
        members = {
            key: entry for key, entry in vars(value).items() if getattr(entry, "__module__", "") == value.__name__
        }
        public = {key: entry for key, entry in members.items() if not key.startswith("_")}
        for key, entry in sorted(public.items()):
            yield from lines_of(f"{name}.{key}", entry)
    elif isinstance(value, type):
        yield name, "class"
        yield from arguments_of(name, value)
        for key, entry in vars(value).items():
            if key == "__call__" or (not key.startswith("_") and isinstance(entry, (FunctionType, property))):
                yield from lines_of(f"{name}.{key}", entry)
    elif isinstance(value, property):
        yield name, "property"
    else:
        yield name, "function"
        yield from arguments_of(name, value)


def arguments_of(name: str, function: Any) -> Iterator[tuple[str, str]]:
    """Yield a line for each argument: its place, or that it has none, and its default."""
    for position, argument in enumerate(inspect.signature(function).parameters.values()):
        if argument.name == "self":
            continue
        positional = argument.kind is argument.POSITIONAL_OR_KEYWORD
        place = f"argument {position}" if positional else argument.kind.description
        default = "" if argument.default is argument.empty else f" = {default_of(argument)}"
        yield f"{name}({argument.name})", f"{place}{default}"


def default_of(argument: inspect.Parameter) -> str:
    """Return a default as it is written; of an object of a class without a literal, the class."""
    return repr(argument.default) if isinstance(argument.default, PLAIN) else f"<{type(argument.default).__name__}>"


def operations(kernel: ModuleType) -> dict[str, str]:
    """Return the schemas of a build's operations, without the names of aliases, which torch numbers as it likes."""
    native = kernel.kernels.native
    namespace = native.add_op_namespace_prefix("")
    all_names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(namespace)]
    # A portable variant of the same commit may be loaded beside a compiled one.
    names = [name for name in all_names if name.startswith(f"{namespace}portable_") == native.IS_PORTABLE]
    schemas = (str(torch._C._get_schema(*(name.split(".") if "." in name else (name, "")))) for name in names)
    plain = (re.sub(r"\(\w+!\)", "(!)", schema.removeprefix(namespace + native.PREFIX)) for schema in schemas)
    return {schema.partition("(")[0]: schema for schema in plain}


def group_keys(kernel: ModuleType) -> dict[str, str]:
    """Return the keys of parameter groups: those that state dicts have, and others that users may give."""
    settings = {*kernel.parameters.settings.SETTINGS, *kernel.parameters.group_keys._OURS}
    saved = {key for group in optimizer_of(kernel).state_dict()["param_groups"] for key in group}
    return {key: "saved" if key in saved else "given" for key in settings | saved}


def state_keys(kernel: ModuleType) -> dict[str, str]:
    """Return the keys of state, with the branches that have them and the dtypes that they can have."""
    forms: dict[str, set[str]] = {}
    for settings, dtype in STATES:
        optimizer = optimizer_of(kernel, dtype, **settings)
        for group in optimizer.param_groups:
            branch = "muon" if group["use_muon"] else "adamw"
            for key, value in optimizer.state[group["params"][0]].items():
                forms.setdefault(key, set()).add(f"{branch} {str(value.dtype).removeprefix('torch.')}")
    return {key: ", ".join(sorted(kinds)) for key, kinds in forms.items()}


def optimizer_of(kernel: ModuleType, dtype: torch.dtype = torch.float32, **settings: Any) -> torch.optim.Optimizer:
    """Return an optimizer of one parameter of each branch."""
    params = {"weight": Parameter(torch.ones(8, 64, dtype=dtype)), "bias": Parameter(torch.ones(8, dtype=dtype))}
    return kernel.Muon(params.items(), **settings)
