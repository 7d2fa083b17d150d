"""Stage 1: facts about this machine, two measured ceilings with which everything is compared, and the calibrations."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.machine import describe, device_name
from benchmarks.predicted_step import COPIED, modelled_gpu
from benchmarks.timing import take_turns
from tools.build.commands import run
from tools.lab import calibration
from tools.lab.items import Item, Lab, NotApplicableError
from tools.lab.records import FILE, read

# A square product of this side takes far longer than a launch, and most libraries are tuned for it.
SIDE = 8192

# Bytes that the copy reads and writes: several times the largest cache.
COPIED_BYTES = 1 << 31

QUERY = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"


def items(lab: Lab) -> Iterator[Item]:
    """Yield the items of this stage."""
    yield Item("device", partial(device, lab))
    formats = lab.kernel.kernels.formats
    for dtype in formats.HALF_DTYPES:
        yield Item(f"dense {formats.dtype_name(dtype)}", partial(dense, lab, dtype))
    yield Item("copy", partial(copy, lab))
    yield Item("nvidia-smi", nvidia_smi)
    yield from calibration.items(lab)


def device(lab: Lab) -> dict:
    """Return names and versions, and what torch says about the GPU."""
    facts = describe(lab.kernel, lab.device)
    if lab.device.type == "cuda":
        properties = torch.cuda.get_device_properties(lab.device)
        facts |= {
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
        }
    return facts


def dense(lab: Lab, dtype: torch.dtype) -> dict:
    """Time torch's product of two square matrices."""
    n = 64 if lab.tiny else SIDE
    generator = torch.Generator(lab.device).manual_seed(0)
    A, B = (torch.randn(n, n, generator=generator, device=lab.device).to(dtype) for _ in range(2))
    out = torch.empty_like(A)
    ((seconds, spread),) = take_turns([lambda: torch.mm(A, B, out=out)], lab.device, 3 if lab.tiny else 20)
    gpu, model = modelled_gpu(lab.kernel, lab.device), lab.kernel.kernels.speeds.predictions
    predicted = None if gpu is None else 2 * n**3 / model.dense_seconds(gpu, 1, (n, n, n)) / 1e12
    rates = {"tera_flops": 2 * n**3 / seconds / 1e12, "predicted_tera_flops": predicted}
    return {"side": n, "seconds": seconds, "spread": spread, **rates}


def copy(lab: Lab) -> dict:
    """Time a copy inside the device's memory. Bytes read and bytes written both count."""
    half = (1 << 20 if lab.tiny else COPIED_BYTES) // 2
    source = torch.randint(256, (half,), dtype=torch.uint8, device=lab.device)
    target = torch.empty_like(source)
    ((seconds, spread),) = take_turns([lambda: target.copy_(source)], lab.device, 3 if lab.tiny else 20)
    predicted = COPIED / 1e9 if "H200" in device_name(lab.device) else None
    rates = {"giga_bytes": 2 * half / seconds / 1e9, "predicted_giga_bytes": predicted}
    return {"bytes": 2 * half, "seconds": seconds, "spread": spread, **rates}


def copied_in_a_second(lab: Lab) -> float | None:
    """Return the bytes that `copy` has measured, if it has."""
    contents = read(lab.out / FILE) or ({}, [])
    values = [
        each.value for each in contents[1] if (each.stage, each.key, each.status) == ("environment", "copy", "ok")
    ]
    return 1e9 * values[0]["giga_bytes"] if values else None


def nvidia_smi() -> dict:
    """Return the driver's version and the clocks just after the products."""
    if shutil.which("nvidia-smi") is None:
        raise NotApplicableError("there is no nvidia-smi")
    words = run(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]).splitlines()[0]
    return dict(zip(QUERY.split(","), (word.strip() for word in words.split(","))))
