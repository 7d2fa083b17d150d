"""What a stage is made of: items, each of which runs by itself and leaves one record."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch

from tests.support.proofs import race

loses_gpu = race.loses_gpu

# Of what is timed in turns.
ROUNDS, TINY_ROUNDS = 20, 2

STAGES = ("environment", "prove", "tune", "measure")


class NotApplicableError(Exception):
    """An item that does not apply here; the message says why."""


class FailedError(Exception):
    """An item that ran and found something wrong; the message says what, `value` is kept all the same."""

    def __init__(self, message: str, value: object = None):
        super().__init__(message)
        self.value = value


@dataclass(frozen=True)
class Lab:
    """What the items of a stage work with; `tiny` walks through all of it on a CPU and proves nothing."""

    kernel: ModuleType
    device: torch.device
    variants: Path  # the folder that holds the variant, which the sweeps load
    out: Path  # where records are, and what the items write
    configs: tuple[Path, ...]  # folders that get the tuned configurations
    tiny: bool
    until: float = math.inf  # on the monotonic clock: when the stage is over

    @property
    def rounds(self) -> int:
        """How often each of several works is timed."""
        return TINY_ROUNDS if self.tiny else ROUNDS


@dataclass(frozen=True)
class Item:
    """A piece of a stage: `run` returns what goes into its record, and is stopped after `limit` seconds."""

    key: str
    run: Callable[[], object] = field(repr=False)
    limit: float = 60.0
