"""The variants that a release has: what docs/platforms.md promises, the release workflow builds, and publishing takes.

The Hub's builder can make more, for other versions of CUDA. A release has none that this repository has not built,
linked and inspected by itself, since a user's loader would prefer it to one that has been.
"""

from __future__ import annotations

from tools.build.noarch import NOARCH_BACKENDS

COMPILED = (
    "torch-stable-abi211-cpu-x86_64-linux",
    "torch-stable-abi211-cpu-aarch64-linux",
    "torch-stable-abi211-cu130-x86_64-linux",
    "torch-stable-abi211-cu130-aarch64-linux",
)
PORTABLE = tuple(f"torch-{backend}" for backend in NOARCH_BACKENDS)
RELEASED = (*COMPILED, *PORTABLE)
