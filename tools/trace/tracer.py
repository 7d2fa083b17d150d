"""The functions of one package that run while some work is done, in order.

An entry is a call of a function whose source is in the package's folder, or a resumption of a generator of it. Lambdas
and generator expressions are functions too, and so are comprehensions before Python 3.12. Functions of other packages,
such as torch's decorators, are invisible: the package function outside of them calls the one inside.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple


class Stay(NamedTuple):
    """Successive entries into functions of one file; `depth` is how many package functions were around the first."""

    file: str
    depth: int
    functions: list[str]


@dataclass
class Trace:
    """What was entered.

    `changes` counts each entry whose file is not that of the entry before, which `stays` list: what a reader meets who
    follows the calls. `switches` counts each time that the file in execution changes, so that coming back to the caller
    counts as well.
    """

    stays: list[Stay] = field(default_factory=list)
    functions: set[tuple[str, str]] = field(default_factory=set)  # file and qualified name
    switches: int = 0
    nesting: int = 0  # the most package functions inside each other

    @property
    def calls(self) -> int:
        return sum(len(stay.functions) for stay in self.stays)

    @property
    def files(self) -> int:
        return len({stay.file for stay in self.stays})

    @property
    def changes(self) -> int:
        return max(len(self.stays) - 1, 0)


def trace(work: Callable[[], object], folder: Path) -> Trace:
    """Return what `work`, which is called once, enters of the package in `folder`; other threads are not seen."""
    recorder = _Recorder(folder)
    before = sys.getprofile()
    sys.setprofile(recorder.observe)
    try:
        work()
    finally:
        sys.setprofile(before)
    return recorder.trace


class _Recorder:
    def __init__(self, folder: Path):
        self.trace = Trace()
        self._prefix = f"{folder}/"
        self._frames: list[FrameType] = []  # of the package, the one that runs last
        self._executed = ""  # the file that was last in execution

    def observe(self, frame: FrameType, event: str, _: object) -> None:
        """Note an event, as `sys.setprofile` tells of them."""
        if not frame.f_code.co_filename.startswith(self._prefix):
            return
        if event == "call":
            self._enter(frame)
        elif event == "return" and self._frames and self._frames[-1] is frame:
            # A generator that is closed early returns without having been resumed.
            self._frames.pop()
            if self._frames:
                self._execute(self._file(self._frames[-1].f_code))

    def _enter(self, frame: FrameType) -> None:
        file, name = self._file(frame.f_code), frame.f_code.co_qualname
        stays = self.trace.stays
        if not stays or stays[-1].file != file:
            stays.append(Stay(file, len(self._frames), []))
        stays[-1].functions.append(name)
        self._frames.append(frame)
        self.trace.functions.add((file, name))
        self.trace.nesting = max(self.trace.nesting, len(self._frames))
        self._execute(file)

    def _execute(self, file: str) -> None:
        if self._executed and file != self._executed:
            self.trace.switches += 1
        self._executed = file

    def _file(self, code: CodeType) -> str:
        return code.co_filename.removeprefix(self._prefix)
