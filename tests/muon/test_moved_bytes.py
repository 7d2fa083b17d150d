"""What each pass of a step moves on a fake GPU, by the shapes of its operands: predictions of steps rest on it."""

from __future__ import annotations

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.fake_gpu import MATRICES, Work, fake_gpu
from benchmarks.predicted_step import ADAMW_BYTES

FULL, HALF = torch.float32, torch.float16


def moved(operation, *operands: torch.Tensor | list[torch.Tensor], **options) -> int:
    with Work() as work:
        operation(*operands, **options)
    assert sum(work.kernels.values()) - work.kernels["take_roots"] == 1
    return work.bytes


@pytest.mark.parametrize("momentum, packed", [(FULL, FULL), (FULL, HALF), (torch.bfloat16, HALF)])
def test_packing_reads_gradient_and_momentum_and_writes_momentum_and_directions(kernel, momentum, packed):
    with fake_gpu(kernel, "torch"):
        G, M = (torch.empty(48, 80, device="cuda", dtype=momentum) for _ in range(2))
        U, norms = torch.empty(1, 48, 80, device="cuda", dtype=packed), torch.empty(1, device="cuda", dtype=FULL)
        traffic = moved(kernel.kernels.native.momentum_pack_, [M], [G], U, 0.9, True, norms=norms)
    assert traffic == G.numel() * (3 * momentum.itemsize + packed.itemsize) + norms.itemsize


@pytest.mark.parametrize("parameter, update", [(FULL, HALF), (FULL, FULL), (torch.bfloat16, HALF)])
def test_descent_reads_parameter_and_update_and_writes_the_parameter(kernel, parameter, update):
    with fake_gpu(kernel, "torch"):
        P, U = (
            torch.empty(*size, device="cuda", dtype=d) for size, d in [((48, 80), parameter), ((1, 48, 80), update)]
        )
        numbers = [torch.empty(1) for _ in range(3)]
        traffic = moved(kernel.kernels.native.descend_, [P], U, *numbers)
    assert traffic == P.numel() * (2 * parameter.itemsize + update.itemsize)


def test_normalizing_reads_a_matrix_and_its_norm_and_writes_another_matrix(kernel):
    with fake_gpu(kernel, "torch"):
        X, out = (torch.empty(1, 48, 80, device="cuda", dtype=dtype) for dtype in (FULL, HALF))
        norms = torch.empty(1, device="cuda", dtype=torch.float64)
        traffic = moved(kernel.kernels.native.normalize_, out, X, norms, 1e-7, 1.0)
    assert traffic == X.numel() * (4 + 2) + 8


def test_adamw_only_reads_the_gradient_and_changes_the_other_three():
    with FakeTensorMode():
        tensors = [[torch.empty(5000, device="cuda")] for _ in range(4)]
        numbers = {"lr": 1.0, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
        flags = {"amsgrad": False, "maximize": False}
        traffic = moved(torch._fused_adamw_, *tensors, [], [torch.ones(())], **numbers, **flags)
    assert traffic == 5000 * (4 + 3 * 8) == 5000 * ADAMW_BYTES


def test_a_product_reads_a_matrix_and_its_transpose_once_and_only_writes_its_result(kernel):
    with fake_gpu(kernel, "symmetric"):
        X, C = (torch.empty(2, 48, k, device="cuda", dtype=HALF) for k in (80, 48))
        product = kernel.kernels.gpu.symmetric_gemm.symmetric_gemm_
        gram, square = moved(product, X, X.mT, None, C, *(1.0,) * 3), moved(product, C, C, C, C.clone(), *(1.0,) * 3)
    assert (gram, square) == (2 * (X.numel() + C.numel()), 2 * 2 * C.numel())


@pytest.mark.parametrize("addend_is_a_factor", [True, False])
def test_torchs_sum_copies_its_addend_and_then_reads_the_copy(addend_is_a_factor):
    """The copy moves two matrices; the product reads the copy and its factors, and writes the result over the copy."""
    with FakeTensorMode(), Work() as work:
        A, D = (torch.empty(2, 48, 48, device="cuda", dtype=HALF) for _ in range(2))
        torch.baddbmm(A if addend_is_a_factor else D, A, A, beta=0.5)
    matrices = 2 * A.numel()  # bytes
    assert (work.bytes, work.bytes_of_products) == (5 * matrices, 3 * matrices)


def test_what_is_changed_in_place_moves_twice_and_what_is_overwritten_once():
    with FakeTensorMode():
        x, y = (torch.empty(1000, device="cuda") for _ in range(2))
        traffic = [
            moved(f, *operands) for f, operands in [(x.mul_, (2.0,)), (x.fill_, (1.0,)), (x.zero_, ()), (x.add, (y,))]
        ]
    assert traffic == [8000, 4000, 4000, 12000]


def test_a_launch_takes_as_many_matrices_as_it_is_counted_for(repository):
    (count,) = re.findall(r"kMatrices = (\d+);", (repository / "optimizer_cuda/tiles.cuh").read_text())
    assert int(count) == MATRICES
