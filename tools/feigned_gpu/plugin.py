"""Makes a process's GPU a feigned one, and the package ready for it when somebody gets it.

Every Python process of `make feigned-gpu` imports this at its start. Ranks that ask for NCCL get gloo, which sends
tensors of GPUs, too.
"""

from __future__ import annotations

import os
import warnings
from types import ModuleType

import kernels
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .launches import feign_launches, hopper_gemm
from .operations import feign, feign_own

# The variable of the environment with the folder of the feigned libraries.
LIBRARIES = "FEIGNED_GPU_LIBRARIES"

get_kernel, init_process_group, get_backend = kernels.get_kernel, dist.init_process_group, dist.get_backend
_ready: set[str] = set()


def get_ready_kernel(*args, **options) -> ModuleType:
    kernel = get_kernel(*args, **options)
    namespace = kernel._ops.add_op_namespace_prefix("").removesuffix("::")
    if namespace not in _ready:
        feign_own(namespace, {"hopper_gemm_": hopper_gemm})
        feign_launches(kernel, os.environ[LIBRARIES])
        _ready.add(namespace)
    return kernel


def init_process_group_over_gloo(backend: str | None = None, *args, **options) -> None:
    options.pop("device_id", None)
    feigned = {"nccl": "cuda:gloo", "cpu:gloo,cuda:nccl": "cpu:gloo,cuda:gloo"}
    init_process_group(feigned.get(backend, backend), *args, **options)


def get_feigned_backend(*args) -> str:
    backend = get_backend(*args)
    return "nccl" if backend in ("cuda:gloo", "undefined") else backend


with warnings.catch_warnings():  # of operations that are overridden
    warnings.simplefilter("ignore")
    feign(torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"))
    feign(["aten::copy_"])  # which is registered for all devices, and asks which one inside
kernels.get_kernel = get_ready_kernel
dist.init_process_group = init_process_group_over_gloo
dist.get_backend = distributed_c10d.get_backend = get_feigned_backend
