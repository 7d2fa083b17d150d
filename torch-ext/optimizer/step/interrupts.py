"""Ctrl-C during a change: it waits for the end, because half a change would be of no use to anyone."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from types import FrameType
from typing import Callable, Iterator, Optional


@contextmanager
def interrupted_at_the_end() -> Iterator[None]:
    """Return a context at whose end a Ctrl-C from within it raises KeyboardInterrupt; a second one does so at once.

    Only the main thread is interrupted, and only by Python's handler of the signal: with another one nothing changes.
    """
    waiting: list[int] = []

    def wait(number: int, frame: Optional[FrameType]) -> None:
        if waiting:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # here, as the end may not come to it any more
            signal.default_int_handler(number, frame)
        waiting.append(number)

    if not _takes_the_place_of_pythons(wait):
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if waiting:
            raise KeyboardInterrupt


def _takes_the_place_of_pythons(handler: Callable[[int, Optional[FrameType]], None]) -> bool:
    """Whether `handler` handles the signal from now on: only in the main thread, and if Python's handler did before."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    try:
        signal.signal(signal.SIGINT, handler)
    except ValueError:  # in other threads, also where `threading` takes one for the main thread that has imported it
        return False
    return True
