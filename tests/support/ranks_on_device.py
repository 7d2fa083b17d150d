"""Ranks whose tensors are on the modelled device of `narrow_device`: messages start and end there, as NCCL's do."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.support import sharded_models
from tests.support.narrow_device import NarrowDevice, narrow_device
from tests.support.pieces import Pieces
from tests.support.sharded_models import Case, Layout

DEVICE = torch.device("xpu", 0)


@contextmanager
def on_modelled_device(kernel: ModuleType) -> Iterator[NarrowDevice]:
    """Let parameters and gradients of cases lie on a modelled device that has float64."""
    importlib.import_module(f"{kernel.__name__}.kernels.portable.operations")
    with (
        narrow_device(kernel, DEVICE.type, has_float64=True) as narrow,
        mock.patch.object(sharded_models, "sharded", _sharded),
        mock.patch.object(sharded_models, "whole", _whole),
    ):
        yield narrow


def train_on_device(kernel: ModuleType, case: Case) -> Pieces:
    """The job of every rank: train its parts on the device."""
    with on_modelled_device(kernel):
        return sharded_models.train(kernel, case)


@functools.cache
def _mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """Return a mesh of the modelled device, which torch cannot make, from one of the CPU."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("xyz")[: len(shape)])
    mesh._device_type = DEVICE.type
    return mesh


def _sharded(value: Tensor, layout: Layout | None) -> torch.nn.Parameter:
    """Do what `sharded_models.sharded` does, on the device."""
    if layout is None:
        return torch.nn.Parameter(value.to(DEVICE))
    on_cpu = sharded_models.mesh_of(layout.mesh)
    with _disable_current_modes():
        part = distribute_tensor(value, on_cpu, layout.placements(), src_data_rank=None)._local_tensor
    mesh, size = _mesh_of(layout.mesh), {"shape": value.shape, "stride": value.stride()}
    return torch.nn.Parameter(DTensor.from_local(part.to(DEVICE), mesh, layout.placements(), run_check=False, **size))


def _whole(value: Tensor) -> Tensor:
    """Do what `sharded_models.whole` does: parts are put together on the CPU."""
    value = value.detach()
    if not isinstance(value, DTensor):
        return value.cpu().clone(memory_format=torch.contiguous_format)
    mesh, part = sharded_models.mesh_of(tuple(value.device_mesh.shape)), value._local_tensor.cpu()
    with _disable_current_modes():
        size = {"shape": value.shape, "stride": value.stride()}
        return DTensor.from_local(part, mesh, value.placements, run_check=False, **size).full_tensor().clone()
