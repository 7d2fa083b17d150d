"""Whether parameters and state are between two steps: elsewhere neither a step nor a checkpoint would be correct."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any, Iterator

from .interrupts import interrupted_at_the_end


class Change:
    """What steps and loads change together: whether one of them is running, and whether the last broke off."""

    def __init__(self, broke_off: bool = False):
        self._broke_off, self._is_running = broke_off, False

    def __reduce__(self) -> tuple[Any, ...]:
        return Change, (self._broke_off,)  # True while one is running: such a copy has old tensors and new ones

    @contextmanager
    def running(self, of_all: bool = True, among_ranks: bool = False) -> Iterator[None]:
        """Return a context for one change, which is complete if no error leaves it.

        A change `of_all` parameters and states also heals an earlier one that broke off; another change does not. One
        that does not wait for other ranks, which may never answer, is completed before Ctrl-C raises KeyboardInterrupt.
        """
        with nullcontext() if among_ranks else interrupted_at_the_end():
            broke_off_before, self._is_running, self._broke_off = self._broke_off, True, True
            try:
                yield
                self._broke_off = broke_off_before and not of_all
            finally:
                self._is_running = False

    def check_complete(self) -> None:
        """Raise RuntimeError while a step or load is running, and after one that failed halfway."""
        if self._is_running:  # this is a signal handler, a hook, or another thread
            raise RuntimeError(
                "a step or load is running, which has changed some parameters and states and not yet others: save, or "
                "take a step, after it. Let a signal handler set a flag, and look at that after each step"
            )
        if self._broke_off:
            raise RuntimeError(
                "the last step or load broke off with an error: some parameters and states were changed and others "
                "were not, so neither another step nor a checkpoint would be correct. On all ranks that share "
                "parameters, load parameters and state, either into a new optimizer (torch.distributed.checkpoint "
                "needs that) or into this one (load_state_dict). A new optimizer without a state starts with zero "
                "momentum"
            )
