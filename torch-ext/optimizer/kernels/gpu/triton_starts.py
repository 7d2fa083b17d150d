"""Starts of compiled Triton kernels, without what Triton's launcher does in Python each time.

That launcher makes the tensor descriptors of each launch, and asks the driver about the address of each tensor. Most of
a launch's time on the host goes there. Here descriptors are kept, since a step uses the same few buffers again and
again, and addresses are numbers.

Below the launcher is a part in C, whose arguments differ from version to version. The launcher itself starts a kernel
that needs scratch memory, one on a GPU that is not NVIDIA's, and any where Triton keeps this part elsewhere.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, NamedTuple, Optional, Sequence

# How many descriptors of one operand are kept. A program whose buffers keep changing empties the table now and then.
MAX_DESCRIPTORS = 256

# Starts a kernel: the stream, the addresses of A and B, all other arguments.
Starter = Callable[..., None]


class Panel(NamedTuple):
    """What Triton's launcher reads of a `TensorDescriptor`, without the checks that its constructor makes."""

    address: int
    shape: list[int]
    strides: list[int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False

    @property
    def base(self) -> Panel:
        """What has the address."""
        return self

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address


class Descriptors(dict):
    """By address: the arguments that stand for an operand that a tensor descriptor reads."""

    def __init__(self, make: Callable[[Panel], Sequence], shape: list[int], strides: list[int]):
        self._make, self._shape, self._strides = make, shape, strides

    def __missing__(self, address: int) -> tuple:
        if len(self) >= MAX_DESCRIPTORS:
            self.clear()
        made = self[address] = tuple(self._make(Panel(address, self._shape, self._strides)))
        return made


def starter(compiled: Any, grid: tuple[int, int, int], panels: Sequence[tuple[list[int], list[int]]]) -> Starter:
    """Return what starts a kernel that Triton `compiled`, whose first operands are A and B.

    `panels` are shape and strides of A and of B if descriptors read these, else there are none.
    """
    below = _part_in_c(compiled.run, len(panels))
    if below is not None:
        return _direct(below, compiled, grid, panels)
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def start(stream: int, a: Any, b: Any, *others: Any) -> None:
        if panels:
            a, b = Panel(a, *panels[0]), Panel(b, *panels[1])
        # Without metadata of the launch, and without the hooks before and after it, which would read that.
        run(*grid, stream, function, metadata, None, None, None, a, b, *others)

    return start


class _PartInC(NamedTuple):
    launch: Callable[..., None]
    makes: tuple[Callable[[Panel], Sequence], ...]  # of each operand with a descriptor, what makes its arguments


def _part_in_c(run: Any, panels: int) -> Optional[_PartInC]:
    """Return the part in C of a launcher, which takes all arguments as they are; None if the launcher may do more."""
    needs = "global_scratch_size", "profile_scratch_size", "gsan_enabled"
    if type(run).__name__ != "CudaLauncher" or any(getattr(run, need, 0) for need in needs):
        return None
    if not panels:
        return None if inspect.isfunction(run.launch) else _PartInC(run.launch, ())
    around = inspect.getclosurevars(run.launch).nonlocals if inspect.isfunction(run.launch) else {}
    known, make = around.get("tensordesc_meta"), getattr(inspect.getmodule(type(run)), "make_tensordesc_arg", None)
    if "launcher" not in around or make is None or not known or len(known) != panels or None in known:
        return None
    # In Triton 3.9 there is a third parameter, which the function does not read.
    unread = (None,) * (len(inspect.signature(make).parameters) - 2)
    return _PartInC(around["launcher"], tuple(lambda panel, of=of: make(panel, of, *unread) for of in known))


def _direct(below: _PartInC, compiled: Any, grid: tuple[int, int, int], panels: Sequence) -> Starter:
    """Return the start of a launch that passes all arguments to the launcher's part in C."""
    run, launch, function, metadata = compiled.run, below.launch, compiled.function, compiled.packed_metadata
    (x, y, z), options = grid, (run.launch_cooperative_grid, run.launch_pdl)
    kept = [Descriptors(make, *panel) for make, panel in zip(below.makes, panels)] or [_Addresses()] * 2
    of_a, of_b = kept
    if hasattr(run, "kernel_signature"):
        before = *options, metadata, None, None, None, None, None, run.arg_annotations, run.kernel_signature

        def start(stream: int, a: int, b: int, *others: Any) -> None:
            launch(x, y, z, stream, function, *before, (*of_a[a], *of_b[b], *others))

    else:  # Triton 3.6
        before = *options, None, None, metadata, None, None, None

        def start(stream: int, a: int, b: int, *others: Any) -> None:
            launch(x, y, z, stream, function, *before, *of_a[a], *of_b[b], *others)

    return start


class _Addresses:
    """The argument that stands for an operand which comes by its address."""

    def __getitem__(self, address: int) -> tuple[int]:
        return (address,)
