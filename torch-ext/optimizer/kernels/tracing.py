"""What a tracer is told about functions, and which tensors are traced, transformed or fake."""

from __future__ import annotations

from typing import Callable, Iterable, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad

Function = TypeVar("Function", bound=Callable)


def constant_while_traced(function: Function) -> Function:
    """Mark `function` as one whose result `torch.compile` computes once, while it traces; return it.

    The same mark as that of `torch.compiler.assume_constant_result`, which imports `torch._dynamo` to set it: more than
    a second, for users who may never compile anything.
    """
    function._dynamo_marked_constant = True
    return function


def is_transformed(X: Tensor) -> bool:
    """Whether autograd, in either mode, or `torch.func`, such as `vmap`, goes through what is computed from X.

    The operations of this package support neither. While `torch.compile` traces, everything inside of a transform is
    taken to go through it.
    """
    if torch.is_grad_enabled() and X.requires_grad:
        return True
    if torch.compiler.is_compiling():
        return _is_inside_a_transform()
    return torch._C._functorch.is_functorch_wrapped_tensor(X) or forward_ad.unpack_dual(X).tangent is not None


@constant_while_traced
def _is_inside_a_transform() -> bool:
    """Whether what is traced now is inside of `torch.func`'s transforms or of forward-mode autograd."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def lacks_values(x: Tensor) -> bool:
    """Whether nothing can be read from x: it is on meta, or a fake tensor, whatever device that shows."""
    return x.is_meta or is_fake(x)


def would_be_faked(tensors: Iterable[Tensor]) -> bool:
    """Whether some of these tensors are real, and views and copies of them made here would be fake."""
    return torch._guards.active_fake_mode() is not None and not all(map(is_fake, tensors))
