"""The items of a stage. Each runs by itself and leaves one record."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch

from tests.support.proofs import race
from tests.support.triton_gpu import UNSUPPORTED

loses_gpu = race.loses_gpu

# For works that are timed in turns.
ROUNDS, TINY_ROUNDS = 20, 2

STAGES = ("environment", "prove", "tune", "measure")


class NotApplicableError(Exception):
    """An item that does not apply here; the message says why."""


class FailedError(Exception):
    """An item that ran and found something wrong. The message says what; `value` is recorded all the same."""

    def __init__(self, message: str, value: object = None):
        super().__init__(message)
        self.value = value


class CutError(Exception):
    """An item that ran out of time. The message says what is missing; `value` is what it has found until then."""

    def __init__(self, message: str, value: object = None):
        super().__init__(message)
        self.value = value


@dataclass(frozen=True)
class Lab:
    """What the items of a stage work with. `tiny` runs everything on a CPU with tiny sizes and proves nothing."""

    kernel: ModuleType
    device: torch.device
    variants: Path  # the folder that holds the variant, which the sweeps load
    out: Path  # the folder of the records and of what items write
    configs: tuple[Path, ...]  # folders that get the tuned configurations
    tiny: bool
    until: float = math.inf  # on the monotonic clock: when the stage must end

    @property
    def rounds(self) -> int:
        """How many times each of several works is timed."""
        return TINY_ROUNDS if self.tiny else ROUNDS


@dataclass(frozen=True)
class Item:
    """A piece of a stage: `run` returns what its record keeps, and is stopped after `limit` seconds.

    With `again` it runs once in each run of the lab, even if its record says that it is done.
    """

    key: str
    run: Callable[[], object] = field(repr=False)
    limit: float = 60.0
    again: bool = False


def require_triton(lab: Lab) -> None:
    """Raise NotApplicableError on a GPU on which the package launches none of Triton's kernels."""
    if not lab.kernel.kernels.speeds.machine.supports_triton(lab.device):
        raise NotApplicableError(UNSUPPORTED)
