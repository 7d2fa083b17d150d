"""Clients of a Hub that take this machine for another one: the loader asks `platform`, `sysconfig` and torch.

Each client is a fork of one process that has imported torch and the loader, so that many of them take seconds.
"""

from __future__ import annotations

import platform
import sysconfig
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import kernels
import torch
from kernels.backends import CUDA, TPU, XPU, Backend, Metal, ROCm
from torch.torch_version import TorchVersion

from tests.support.small_training import trained_on_cpu
from tools.pages.platforms import Platform

SYSTEMS = {"linux": "Linux", "darwin": "Darwin", "windows": "Windows"}
# What these systems call a machine.
MACHINES = {("darwin", "aarch64"): "arm64", ("windows", "x86_64"): "AMD64"}


def in_forks(function: Callable[..., Any], calls: Sequence[tuple]) -> list[Any]:
    """Return what `function` returns for each of `calls`, each in a process of its own, one after the other."""
    results = []
    for arguments in calls:
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as fork:
            results.append(fork.submit(function, *arguments).result())
    return results


def feign(machine: Platform, backend: Backend, version: str) -> None:
    """Make the loader believe that it is on `machine`, with a torch of this version that is built for `backend`."""
    platform.machine = lambda: MACHINES.get((machine.system, machine.cpu), machine.cpu)
    platform.system = lambda: SYSTEMS[machine.system]
    config = sysconfig.get_config_var
    sysconfig.get_config_var = lambda name: machine.free_threaded if name == "Py_GIL_DISABLED" else config(name)
    torch.__version__ = TorchVersion(f"{version}.0")
    number = getattr(backend, "version", None)
    torch.version.cuda = str(number) if isinstance(backend, CUDA) else None
    torch.version.hip = f"{number}.26015-0123abc" if isinstance(backend, ROCm) else None
    torch.version.xpu = f"{number.major}0{number.minor}01" if isinstance(backend, XPU) else None
    torch.backends.mps.is_available = lambda: isinstance(backend, Metal)
    if isinstance(backend, TPU):
        torch.backends.tpu = object()


def loaded_variant(machine: Platform, backend: Backend, version: str, repo_id: str, revision: str) -> str:
    """Return the name of the variant that `get_kernel` loads on such a machine, or what it raises."""
    feign(machine, backend, version)
    try:
        return Path(kernels.get_kernel(repo_id, revision=revision).__file__).parent.name
    except FileNotFoundError as error:
        return f"FileNotFoundError: {error}"


def trained(machine: Platform, backend: Backend, version: str, repo_id: str, revision: str) -> dict[str, Any]:
    """Return what such a machine's CPU makes of the variant that it loads."""
    feign(machine, backend, version)
    return trained_on_cpu(kernels.get_kernel(repo_id, revision=revision))
