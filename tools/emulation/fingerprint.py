"""What the package computes on the processor that runs this: hashes of results, and the losses of a training, as JSON.

    python -m tools.emulation.fingerprint build

The Hub's loader chooses the variant in `build`. Besides it this needs torch alone, so that it runs in an emulator.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
from collections.abc import Iterable
from pathlib import Path

import kernels
import torch
from torch import Tensor

from tools.emulation.operations import numbers, results

STEPS = 20


def digest(tensors: Iterable[Tensor]) -> str:
    """Return 16 hex digits that follow from the bits of `tensors`."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(bytes(tensor.contiguous().view(torch.uint8).flatten().tolist()))
    return total.hexdigest()[:16]


def train(kernel) -> list[float]:
    """Return the loss before each of some steps, and after: squared distances of two matrices and a bias to others.

    The work is in float32: the dtype that is chosen by itself depends on the processor.
    """
    shapes = {"wide": (24, 60), "tall": (60, 24), "bias": (24,)}
    ends = {name: numbers(torch.float32, 8, shape=shape) for name, shape in shapes.items()}
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    optimizer = kernel.Muon(parameters.items(), lr=0.1, weight_decay=0.0, ns_dtype=torch.float32)
    losses = []
    for _ in range(STEPS + 1):
        optimizer.zero_grad()
        loss = sum((parameters[name] - ends[name]).square().sum() for name in shapes)
        loss.backward()
        losses.append(loss.item())
        if len(losses) <= STEPS:
            optimizer.step()
    return losses


def fingerprint(build: Path) -> dict:
    """Return what `main` prints."""
    kernel = kernels.get_local_kernel(build, backend="cpu")
    native = kernel.kernels.native
    return {
        "variant": Path(kernel.__file__).parent.name,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "level": torch.backends.cpu.get_cpu_capability(),
        "instructions": ", ".join(map(native.gemm_instructions, (torch.bfloat16, torch.float32))),
        "bits": {name: digest(tensors) for name, tensors in results(native)},
        "losses": train(kernel),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, help="a folder of variants")
    print(json.dumps(fingerprint(parser.parse_args().build)))


if __name__ == "__main__":
    main()
