"""The key of a measurement: the device, and all software between a launch and it."""

from __future__ import annotations

import functools
import hashlib
import itertools
import platform
import re
import sys
from pathlib import Path
from typing import NamedTuple, Optional

import torch

from .. import native
from ..build_metadata import VARIANT, libraries
from ..tracing import constant_while_traced
from .predictions import Gpu

# The oldest compute capability that Triton supports. What it compiles for older ones has no matrix instructions.
_OLDEST_FOR_TRITON = 80
_CPU_FACTS = Path("/proc/cpuinfo")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
# What /proc/cpuinfo calls the numbers of a processor's kind, and what they are called here. The last three are ARM's,
# where there is no name.
_KIND = {
    "cpu family": "family",
    "model": "model",
    "CPU implementer": "implementer",
    "CPU part": "part",
    "CPU variant": "variant",
}


class Key(NamedTuple):
    """Measurements with equal keys are interchangeable."""

    device: str  # its name; for a processor with torch's instructions and those of `gemm_`
    threads: int  # of a processor; 0 for a GPU
    driver: str
    torch: str
    triton: str
    kernels: str  # digest of the package's Python files and compiled operations


def key_of(device: torch.device) -> Optional[Key]:
    """Return the key of a device, or None for an absent GPU and for kinds of devices that are never measured."""
    if device.type == "cpu":
        return Key(processor(), torch.get_num_threads(), "", torch.__version__, "", kernels_digest())
    if device.type == "cuda" and torch.cuda.is_available():
        return gpu_key(torch.cuda.get_device_name(device))
    return None


@functools.cache
def gpu_key(device_name: str) -> Key:
    """Return the key of a GPU of this name in this process."""
    # Triton is imported before any of its kernels is launched. Where it is missing, there is nothing to measure.
    triton = getattr(sys.modules.get("triton"), "__version__", "")
    return Key(device_name, 0, _driver(), torch.__version__, triton, kernels_digest())


@functools.cache
def processor() -> str:
    """Return a processor's name and kind (makers reuse names), torch's instructions and `gemm_`'s by dtype."""
    known = _facts_of_processor()
    name = known.get("model name") or platform.processor() or platform.machine()
    kind = ", ".join(f"{word} {known[field]}" for field, word in _KIND.items() if field in known)
    instructions = ", ".join(map(native.gemm_instructions, (torch.bfloat16, torch.float32)))
    of_torch = torch.backends.cpu.get_cpu_capability()  # which users may limit
    return f"{name}{f' ({kind})' if kind else ''}, torch {of_torch}, {instructions}"


def is_made_by_intel() -> bool:
    """Whether this processor is Intel's; False where neither Linux nor Windows says so."""
    return "GenuineIntel" in (_facts_of_processor().get("vendor_id") or platform.processor())


def _facts_of_processor() -> dict[str, str]:
    """Return what Linux says of the first processor, by the names of the fields; nothing on other systems."""
    if not _CPU_FACTS.exists():
        return {}
    with _CPU_FACTS.open() as lines:  # an empty one ends each processor; Linux takes long to describe hundreds of them
        facts = [line.partition(":") for line in itertools.takewhile(str.strip, lines)]
    return {field.strip(): value.strip() for field, _, value in facts}


@functools.cache
def kernels_digest() -> str:
    """Return a digest of all Python files of the package and of its compiled operations."""
    digest = hashlib.sha256()
    for file in sorted((*VARIANT.rglob("*.py"), *libraries())):
        digest.update(str(file.relative_to(VARIANT)).encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def multiprocessors(device_name: str) -> Optional[tuple[int, int]]:
    """Return compute capability (90 is 9.0) and number of multiprocessors of a GPU of this name, None if absent."""
    if torch.version.hip or not torch.cuda.is_available():
        return None
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        if properties.name == device_name:
            return 10 * properties.major + properties.minor, properties.multi_processor_count
    return None


@constant_while_traced
def gpu_of(device: torch.device) -> Optional[Gpu]:
    """Return what predictions need to know about a GPU; None for another kind of device, and for an absent GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    facts = torch.cuda.get_device_properties(device)
    return Gpu(10 * facts.major + facts.minor, facts.multi_processor_count, facts.L2_cache_size)


def supports_triton(device: torch.device) -> bool:
    """Whether Triton's kernels may run on a device; True if torch does not describe it."""
    gpu = gpu_of(device)
    return gpu is None or gpu.capability >= _OLDEST_FOR_TRITON


def _driver() -> str:
    """Return the versions of the driver's kernel module, if the system shows it, and of its CUDA interface."""
    interface = getattr(torch._C, "_cuda_getDriverVersion", None)
    module = re.search(r"\d+\.\d+(\.\d+)?", _NVIDIA_DRIVER.read_text()) if _NVIDIA_DRIVER.exists() else None
    known = [module.group() if module else "", str(interface()) if interface and torch.cuda.is_available() else ""]
    return " ".join(filter(None, known))
