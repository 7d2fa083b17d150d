"""Names of parameters: in groups, in errors, and in the model itself, without what wrappers put into them."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Iterable, Iterator, Mapping, Sequence

from torch import Tensor

# Names that this package makes for parameters without names.
MADE_UP = re.compile(r"(param|unnamed)_\d+")
# Attributes in which wrappers keep the whole model: DistributedDataParallel, DeepSpeed, torch.compile, Fabric.
MODEL_WRAPPERS = ("module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Components that wrappers insert into names; PEFT also adds the name of an adapter after `modules_to_save`.
_WRAPPERS = {*MODEL_WRAPPERS, "base_model", "base_layer", "original_module", "token_adapter"}
_ADAPTER = re.compile(r"\.modules_to_save\.[^.]+")
# Names of the tensors from which torch.nn.utils.parametrize computes a layer's weight.
_PARAMETRIZED = re.compile(r"(^|\.)parametrizations\.([^.]+)\.original\d*$")


def bare_name(name: str) -> str:
    """Return a parameter's name in the model itself, without the components that wrappers add."""
    parts = unparametrized(_ADAPTER.sub("", name)).split(".")
    return ".".join(part for part in parts if part not in _WRAPPERS)


def unparametrized(name: str) -> str:
    """Return the name that a weight had before `torch.nn.utils.parametrize` put other parameters in its place."""
    return _PARAMETRIZED.sub(r"\1\2", name)


def repeated(names: Iterable[str]) -> list[str]:
    """Return the names that come more than once."""
    return [name for name, count in Counter(names).items() if count > 1]


def names_of(group: Mapping[str, Any]) -> list[str]:
    """Return the names of a group's parameters; parameters that a wrapper has appended are called `unnamed_<i>`."""
    names = list(group["param_names"])
    return names + [f"unnamed_{i}" for i in range(len(names), len(group["params"]))]


def named_parameters(group: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter of a group with its name (`names_of`)."""
    return zip(names_of(group), group["params"])


def listed(names: Sequence[str], shown: int = 3) -> str:
    """Return a text with the first of `names` and the number of the others."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{', '.join(names[:shown])}{more}"
