"""Refuses written tensors that overlap themselves or certainly share memory, as `optimizer_common/arguments.h` does."""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

from torch import Tensor

from .refusals import shown


class Extent(NamedTuple):
    """How elements lie from the first to the last in memory."""

    elements: int = 0  # that fit there; 0 for an empty tensor
    distinct: bool = True  # different elements certainly have different addresses
    gapless: bool = True  # every place certainly holds an element


class Span(NamedTuple):
    """The memory of an argument, as addresses."""

    begin: int
    end: int
    gapless: bool
    written: bool
    name: str


_NOTHING = Span(0, 0, False, False, "")


class Memory:
    """The memory of all arguments of a call: what is written must not share any with another argument."""

    def __init__(self) -> None:
        self._spans: dict[int, list[Span]] = {}  # by address space

    def read(self, name: str, t: Optional[Tensor], index: Optional[int] = None) -> None:
        """Take note of an argument that is read, or of the one at `index` of a list."""
        if t is not None:
            self._add(_named(name, index), t, extent(t), False)

    def write(self, name: str, t: Tensor, index: Optional[int] = None) -> None:
        """Take note of an argument that is written. Raises RuntimeError if its elements overlap."""
        reach = extent(t)
        if not reach.distinct:
            raise RuntimeError(
                f"{name} is written, so its elements must not overlap; "
                f"got shape {shown(t.shape)} with strides {shown(t.stride())}"
            )
        self._add(_named(name, index), t, reach, True)

    def check(self) -> None:
        """Raise RuntimeError for spans that certainly share an element, one of which is written.

        One starts where the other does, or inside it and it has no gaps. Others may just interleave, as columns of one
        matrix do.
        """
        for spans in self._spans.values():
            _check(spans)

    def _add(self, name: str, t: Tensor, reach: Extent, written: bool) -> None:
        if reach.elements:
            begin = t.data_ptr()
            span = Span(begin, begin + reach.elements * t.element_size(), reach.gapless, written, name)
            self._spans.setdefault(_address_space(t), []).append(span)


def _address_space(t: Tensor) -> int:
    """Return a number for the address space of `t`, since only addresses in one space can be compared.

    On Apple's GPUs an address is a storage's handle plus an offset, and handles of two storages may be closer than the
    storages are long. So each storage is a space there. Elsewhere all memory is one.
    """
    return t.untyped_storage().data_ptr() if t.device.type == "mps" else 0


def _check(spans: Sequence[Span]) -> None:
    previous = reaching = writing = _NOTHING  # the last two: gapless, and end last
    for span in sorted(spans, key=lambda s: (s.begin, not s.written)):
        if previous.written and span.begin == previous.begin:
            _refuse(previous, span)
        if span.begin < writing.end:
            _refuse(writing, span)
        if span.written and span.begin < reaching.end:
            _refuse(reaching, span)
        if span.gapless and span.end > reaching.end:
            reaching = span
        if span.gapless and span.written and span.end > writing.end:
            writing = span
        previous = span


def _named(name: str, index: Optional[int]) -> str:
    return name if index is None else f"{name}[{index}]"


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether both have the same elements at the same places."""
    return (a.data_ptr(), a.dtype, a.shape, a.stride()) == (b.data_ptr(), b.dtype, b.shape, b.stride())


def extent(t: Tensor) -> Extent:
    """Return how the elements of a tensor lie in memory."""
    if t.is_contiguous():
        return Extent(t.numel())
    return _walked([(stride, size) for stride, size in zip(t.stride(), t.shape) if size > 1])


def _walked(steps: Sequence[tuple[int, int]]) -> Extent:
    elements, distinct, gapless = 1, True, True
    for stride, size in sorted(steps):
        distinct &= stride >= elements
        gapless &= stride <= elements
        elements += stride * (size - 1)
    return Extent(elements, distinct, gapless)


def _refuse(a: Span, b: Span) -> None:
    written = a if a.written else b
    raise RuntimeError(f"{a.name} and {b.name} must not share memory: {written.name} is written")
