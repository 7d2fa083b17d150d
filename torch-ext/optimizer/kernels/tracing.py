"""What a tracer is told about functions."""

from __future__ import annotations

from typing import Callable, TypeVar

Function = TypeVar("Function", bound=Callable)


def constant_while_traced(function: Function) -> Function:
    """Mark `function` as one whose result `torch.compile` computes once, while it traces; return it.

    The same mark as that of `torch.compiler.assume_constant_result`, which imports `torch._dynamo` to set it: more than
    a second, for users who may never compile anything.
    """
    function._dynamo_marked_constant = True
    return function
