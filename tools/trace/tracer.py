"""The functions of one package that run during some work, in order.

An entry is a call of a function whose source is in the package's folder, or a resumption of one of its generators.
Lambdas and generator expressions are functions, too, and so are comprehensions before Python 3.12. Functions of other
packages, such as torch's decorators, are ignored: it looks as if the package function outside of them called the one
inside.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple


class Stay(NamedTuple):
    """Consecutive entries into functions of one file; `depth` is how many package functions were around the first."""

    file: str
    depth: int
    functions: list[str]


@dataclass
class Trace:
    """The entries.

    `changes` counts entries into another file than the entry before; these files are listed in `stays`. That is what a
    reader who follows the calls sees. `switches` counts each change of the file in execution, so coming back to the
    caller counts as well.
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
    """Call `work` once and return the trace of its entries into the package in `folder`. Other threads are not seen."""
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
        self._frames: list[FrameType] = []  # of the package, the innermost one last
        self._executed = ""  # the file that was executed last

    def observe(self, frame: FrameType, event: str, _: object) -> None:
        """Record an event of `sys.setprofile`."""
        if not frame.f_code.co_filename.startswith(self._prefix):
            return
        if event == "call":
            self._enter(frame)
        elif event == "return" and self._frames and self._frames[-1] is frame:
            # A generator that is closed early returns without being resumed.
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
