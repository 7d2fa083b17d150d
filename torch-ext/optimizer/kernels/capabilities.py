"""Which GPUs this build has code for. Any other GPU is refused by name, before anything runs on it.

`get_kernel` refuses such a build, too, but only looks at the current device; `get_local_kernel` does not look.
"""

from __future__ import annotations

import re
from typing import Optional, Sequence

import torch

from .build_metadata import read_metadata
from .tracing import constant_while_traced

# Compute capabilities as in build.toml: 9.0, 9.0a, 10.0f, 10.0+PTX.
_ARCH = re.compile(r"(\d+)\.(\d+)([af]?)(\+PTX)?")


def check_device(device: torch.device) -> None:
    """Raise ValueError for a GPU that this build has no code for. Without compiled code it takes every device."""
    missing = _missing(device)
    if missing is not None:
        raise ValueError(missing)


@constant_while_traced
def _missing(device: torch.device) -> Optional[str]:
    """Return why a device cannot be used, None if it can. A fake GPU can."""
    archs = architectures()
    if not archs or device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability(device)
    if covers(archs, capability):
        return None
    name, (major, minor) = torch.cuda.get_device_name(device), capability
    return f"{device} ({name}) has compute capability {major}.{minor}, and this build has code for {', '.join(archs)}"


def architectures() -> Sequence[str]:
    """Return what the builder compiled CUDA code for, as in build.toml; empty if it named nothing."""
    return read_metadata().get("backend", {}).get("archs", ())


def covers(archs: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether code for one of `archs` runs on a GPU of a compute capability, such as (9, 0).

    Machine code runs on its own capability and on newer ones of the same major number; code for 9.0a runs on 9.0 alone.
    PTX runs on every newer one. Architectures in another form come from a newer builder; if all do, any GPU is taken.
    """
    known = [arch for arch in map(_ARCH.fullmatch, archs) if arch is not None]
    return not known or any(_runs(arch, capability) for arch in known)


def _runs(arch: re.Match, capability: tuple[int, int]) -> bool:
    compiled, kind = (int(arch[1]), int(arch[2])), arch[3]
    if kind == "a":
        return capability == compiled
    return capability >= compiled and (capability[0] == compiled[0] or (arch[4] is not None and not kind))
