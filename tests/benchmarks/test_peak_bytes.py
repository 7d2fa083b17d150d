"""What the column "peak MB" of `sweep_step` means on a CPU: the most of what a step takes that it holds at a time."""

from __future__ import annotations

import pytest
import torch

from benchmarks.step_costs import peak_bytes

CPU = torch.device("cpu")
SIZE = 1 << 20  # bytes; torch's own tensors beside these are much smaller


def memory(sizes: float) -> torch.Tensor:
    return torch.empty(int(sizes * SIZE), dtype=torch.uint8)


def test_it_is_the_most_that_is_held_at_a_time():
    """Two one after the other, then three together."""

    def step() -> None:
        memory(2)
        together = memory(1), memory(2)
        del together

    assert peak_bytes(step, CPU) == pytest.approx(3 * SIZE, rel=0.01)


def test_what_was_held_before_is_left_out_and_what_a_step_keeps_counts():
    """What was held before is taken to be held to the end: torch does not say when it is given back."""
    kept = [memory(4)]

    def keep() -> None:
        kept.append(memory(1))

    def replace() -> None:
        kept.pop(0)
        kept.append(memory(6))

    assert peak_bytes(keep, CPU) == pytest.approx(SIZE, rel=0.01)
    assert peak_bytes(replace, CPU) == pytest.approx(6 * SIZE, rel=0.01)


def test_a_step_that_takes_nothing_or_only_gives_back_has_none():
    kept = [memory(4)]
    assert peak_bytes(kept.clear, CPU) == peak_bytes(lambda: None, CPU) == 0


def test_memory_of_others_is_not_seen():
    assert peak_bytes(lambda: bytearray(4 * SIZE), CPU) == 0
