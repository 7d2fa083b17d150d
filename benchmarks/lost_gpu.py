"""Who has made the GPU unusable for the process: after that, whatever runs there fails, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.support.proofs import race


@contextmanager
def blaming(name: str) -> Iterator[None]:
    """Raise LostGpuError, with this name, for an error after which the GPU is unusable; other errors pass.

    A contestant may call such an error what it likes, so after any error the GPU is asked.
    """
    try:
        yield
    except Exception as error:
        lost = _loss(error)
        if lost is None:
            raise
        raise race.LostGpuError(name, race.error_described(lost)) from error


def wait_for_gpu() -> None:
    """Wait for what was launched on the GPU, so that its errors are raised here; nothing if none is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _loss(error: Exception) -> Exception | None:
    """Return the error that says that the GPU is lost, this one or the GPU's own answer after it; None if it is not."""
    if race.loses_gpu(error) and not race.lacks_memory(error):
        return error
    try:
        wait_for_gpu()
    except Exception as answer:
        return answer
    return None
