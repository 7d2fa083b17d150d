"""Print how many lines of the package a plan executes, and the megabytes that it takes.

python -m tests.support.large_plan <folder of the variants> <ranks> <copies> <parameters>

It is a process of its own, whose memory nothing else touched. Lines, unlike seconds, are the same on every machine.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from types import FrameType

from benchmarks.built_kernel import load_built
from benchmarks.sweep_plan import Case, peak_megabytes, sharded_parameters


class Lines:
    """Counts the lines that functions of `package` execute, and their calls and returns."""

    def __init__(self, package: Path):
        self._package, self.count = str(package) + os.sep, 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> Lines | None:
        if not frame.f_code.co_filename.startswith(self._package):
            return None
        self.count += 1
        return self


def main() -> None:
    kernel, _ = load_built(Path(sys.argv[1]))
    parameters, lines = sharded_parameters(Case(*map(int, sys.argv[2:]))), Lines(Path(kernel.__file__).parent)
    gc.collect()
    before = peak_megabytes()
    sys.settrace(lines)
    kernel.Muon(parameters)
    sys.settrace(None)
    print(lines.count, peak_megabytes() - before)


if __name__ == "__main__":
    main()
