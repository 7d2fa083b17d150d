"""Print the seconds and the megabytes that the plan of 10,000 parameters on 4,096 ranks takes.

python -m tests.support.large_plan <folder of the variants> <copies>

It is a process of its own, whose memory nothing else touched.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
from time import process_time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS = 4096
PARAMETERS = 10_000
SHAPES = [(4096, 4096), (1024, 4096), (11008, 4096), (4096, 11008)]


def main() -> None:
    os.environ["LOCAL_KERNELS"] = f"org/optimizer={sys.argv[1]}"
    import kernels

    kernel = kernels.get_kernel("org/optimizer", version=1, backend="cpu", trust_remote_code=True)
    dist.init_process_group("fake", rank=1234, world_size=RANKS, store=FakeStore())
    copies = int(sys.argv[2])
    mesh = init_device_mesh("cpu", (copies, RANKS // copies))
    # Without memory: a state of 10,000 parameters is not what is measured.
    params = [(f"layers.{i}.up.weight", parameter(mesh, SHAPES[i % len(SHAPES)])) for i in range(PARAMETERS)]
    optimizer_class = kernel.planned_optimizer.PlannedOptimizer
    make_plan = optimizer_class._make_plan

    def measured(*arguments):
        gc.collect()
        before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, process_time()
        make_plan(*arguments)
        # Of this process alone, whatever else the machine does; the peak, in KiB on Linux.
        print(process_time() - started, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)

    optimizer_class._make_plan = measured
    kernel.Muon(params)


def parameter(mesh, shape: tuple[int, int]) -> torch.nn.Parameter:
    local = torch.empty(-(-shape[0] // mesh.shape[1]), shape[1], device="meta")
    placements = [Replicate(), Shard(0)]
    whole = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))
    return torch.nn.Parameter(whole)


if __name__ == "__main__":
    main()
