"""Which backend this machine's torch can load and this machine can build."""

from __future__ import annotations

import torch

from tools.build.commands import BuildError
from tools.build.compilers import find_cuda


def native_backend() -> str:
    """Return "cuda" if torch is a CUDA build that can load what this machine's nvcc makes, else "cpu".

    A CUDA build of torch loads a CPU variant only if it is requested by name. So pass the result to the loader:
    `kernels.get_kernel(..., backend=native_backend())`.
    """
    if torch.version.cuda is None:
        return "cpu"
    try:
        toolkit = find_cuda().version
    except BuildError:
        return "cpu"
    return "cuda" if loads(torch.version.cuda, toolkit) else "cpu"


def loads(torchs: str, toolkit: str) -> bool:
    """Whether a torch for CUDA `torchs` can load a variant made by `toolkit`: same major version, and not newer."""
    (major, minor), (made_major, made_minor) = (tuple(map(int, text.split(".")[:2])) for text in (torchs, toolkit))
    return made_major == major and made_minor <= minor
