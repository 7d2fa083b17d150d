"""Ctrl-C during a change: it waits for the end, because half a change would be of no use to anyone."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from types import FrameType
from typing import Iterator, Optional


@contextmanager
def interrupted_at_the_end() -> Iterator[None]:
    """Return a context at whose end a Ctrl-C from within it raises KeyboardInterrupt; a second one does so at once.

    Only the main thread is interrupted, and only by Python's handler of the signal: with another one nothing changes.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    waiting: list[int] = []

    def wait(number: int, frame: Optional[FrameType]) -> None:
        if waiting:
            signal.default_int_handler(number, frame)
        waiting.append(number)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if waiting:
            raise KeyboardInterrupt
