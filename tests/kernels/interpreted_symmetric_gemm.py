"""Laws of the symmetric product's Triton kernel in Triton's interpreter; `test_symmetric_gemm.py` runs this file.

It has a process of its own, because TRITON_INTERPRET=1 must be set before Triton is imported and because an access out
of bounds ends the process. Tiles are smaller than any that is shipped, so that small matrices have many.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
from pathlib import Path

import kernels
import pytest
import torch
from torch import Tensor

from tests.support import oracles, triton_interpreter
from tests.support.spectra import SPECTRA, with_spectrum

triton_interpreter.repair_bfloat16()
PACKAGE = kernels.get_kernel("org/optimizer", version=1, trust_remote_code=True)
SYMMETRIC_GEMM = PACKAGE.kernels.symmetric_gemm
TUNED = PACKAGE.kernels.tuned

SMALL = TUNED.Config(tile=32, tile_k=32, group=2, warps=4, stages=2)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SIZES = [(1, 7), (7, 1), (33, 65), (65, 33)]
LARGE = [(127, 65), (65, 200)]
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded", "polynomials")
# One step of a published Newton-Schulz iteration has such coefficients: they cancel, so roundings show.
ALPHA, BETA = 2.0315, -4.775
EPILOGUES = {
    "product": (False, (1.0, 0.0)),
    "numbers": (True, (ALPHA, BETA)),
    "tensors": (True, (torch.tensor(ALPHA), torch.tensor(BETA))),
}


def normal(*shape: int, dtype=torch.float32, seed: int = 0) -> Tensor:
    """Normal entries, such that products over the last dimension are about 1."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) / math.sqrt(max(shape[-1], 1))).to(dtype)


def symmetric(batch: int, m: int, dtype=torch.float32, seed: int = 1) -> Tensor:
    """Symmetric matrices whose eigenvalues are 1 / n, of both signs."""
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(m)[:m]
    vectors = [with_spectrum(SPECTRA["flat"](m), m, m, seed + n) for n in range(batch)]
    S = torch.stack([Q @ torch.diag(signs * SPECTRA["power_law"](m)) @ Q.mT for Q in vectors])
    return ((S + S.mT) / 2).to(dtype)


def every_other(x: Tensor) -> Tensor:
    """The values of x in every other row and column of a larger buffer, not from its start."""
    buffer = x.new_full((x.size(0) + 1, 2 * x.size(1) + 1, 2 * x.size(2) + 3), math.nan)
    view = buffer[1:, 1::2, 3::2]
    return view.copy_(x)


def operands(layout: str, batch: int, m: int, k: int, dtype) -> tuple[Tensor, Tensor]:
    X = normal(batch, m, k, dtype=dtype)
    if layout == "transposed":
        X = X.mT.contiguous().mT
    elif layout == "sliced":
        X = every_other(X)
    elif layout == "expanded":
        X = X[:1].expand(batch, m, k)
    elif layout == "polynomials":
        S = symmetric(batch, m).double()
        return (3 * S + 2 * S @ S).to(dtype), (torch.eye(m) - S @ S).to(dtype)
    return X, X.mT


def product(A, B, D=None, scalars=(1.0, 0.0), C=None, config=SMALL) -> Tensor:
    """alpha A B + beta D by the kernel, in a C that held NaN."""
    C = A.new_empty(A.size(0), A.size(1), A.size(1)) if C is None else C
    SYMMETRIC_GEMM.launch_symmetric_gemm(A, B, D, C.fill_(math.nan), scalars, config)
    return C


def assert_right(A, B, D, scalars, C) -> None:
    """Each entry errs by no more than its roundings."""
    exact, error = oracles.symmetric_product(A, B, D, *map(float, scalars))
    assert ((C.double() - exact).abs() <= error).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_err_by_their_roundings(dtype, layout):
    cases = [*itertools.product(SIZES, EPILOGUES, [1]), *itertools.product(LARGE, ["tensors"], [1])]
    for (m, k), epilogue, batch in [*cases, ((33, 7), "numbers", 3)]:
        A, B = operands(layout, batch, m, k, dtype)
        has_D, scalars = EPILOGUES[epilogue]
        D = symmetric(batch, m, dtype, seed=9) if has_D else None
        D = every_other(D) if has_D and layout == "sliced" else D
        assert_right(A, B, D, scalars, product(A, B, D, scalars))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_safe_configuration_computes_the_product(dtype):
    targets = [TUNED.Target("cuda", capability) for capability in (80, 90, 100, 120)] + [TUNED.Target("hip", 0)]
    choices = itertools.product(targets, (130, 2000), (False, True), (False, True))
    A, B = operands("contiguous", 1, 130, 70, dtype)
    D = symmetric(1, 130, dtype)
    for config in {TUNED.safe_config(target, dtype, *choice) for target, *choice in choices}:
        assert_right(A, B, D, (ALPHA, BETA), product(A, B, D, (ALPHA, BETA), config=config))


def test_the_result_alone_is_rounded():
    """300 ** 2 is more than float16 holds, half of it is not."""
    A = torch.full((1, 1, 1), 300.0, dtype=torch.float16)
    assert product(A, A, A, (0.5, -200.0)) == -15000


@pytest.mark.parametrize("m", [1, 7, 33, 65])
def test_every_entry_is_written_and_nothing_around_it(m):
    A, B = operands("contiguous", 2, m, 20, torch.float32)
    buffer = torch.full((4, 2 * m + 5, 3 * m + 4), 7.0)
    for C in buffer[1:3, 1 : 2 * m + 1 : 2, 2 : 3 * m + 2 : 3], buffer[1:3, 1 : m + 1, 2 : m + 2].mT:
        buffer.fill_(7.0)
        assert product(A, B, C=C).isfinite().all()
        C.fill_(7.0)
        assert (buffer == 7.0).all()


def before_the_end_of(file: Path, x: Tensor) -> Tensor:
    """A copy of x that nothing follows: its file is mapped further than it goes, and to read there ends the process."""
    length = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    mapped = torch.from_file(str(file), True, 2 * length // x.element_size(), dtype=x.dtype)
    os.truncate(file, length)
    end = length // x.element_size()
    return mapped[end - x.numel() : end].view(x.shape).copy_(x)


@pytest.mark.parametrize("m, k", [(1, 7), (33, 7), (40, 33)])
def test_nothing_is_read_behind_an_operand(m, k, tmp_path):
    X, D = normal(2, m, k), symmetric(2, m)
    A, B, addend = (before_the_end_of(tmp_path / n, x) for n, x in zip("ABD", (X, X.mT, D)))
    scalars = ALPHA, BETA
    for left, right in (A, B), (B.mT, A.mT):
        assert torch.equal(product(left, right, addend, scalars), product(X, X.mT, D, scalars))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_result_is_symmetric_bit_for_bit(dtype, layout):
    A, B = operands(layout, 2, 70, 45, dtype)
    C = product(A, B, symmetric(2, 70, dtype), (ALPHA, BETA))
    assert torch.equal(C, C.mT)


def test_a_matrix_gets_the_same_bits_alone_and_in_a_batch():
    A, B = operands("polynomials", 3, 70, 70, torch.float32)
    D = symmetric(3, 70, seed=9)
    together = product(A, B, D, (ALPHA, BETA))
    for n in range(3):
        one = slice(n, n + 1)
        assert torch.equal(product(A[one], B[one], D[one], (ALPHA, BETA)), together[one])


@pytest.mark.parametrize("layout", ["transposed", "sliced"])
def test_strides_do_not_change_a_bit(layout):
    (A, B), (X, Y) = (operands(name, 2, 70, 45, torch.float32) for name in (layout, "contiguous"))
    D = symmetric(2, 70)
    C = every_other(torch.zeros_like(D))
    assert torch.equal(product(A, B, every_other(D), (ALPHA, BETA), C), product(X, Y, D, (ALPHA, BETA)))


@pytest.mark.parametrize("group", [1, 3, 8])
def test_the_order_of_the_tiles_does_not_change_a_bit(group):
    A, B = operands("contiguous", 2, 130, 33, torch.float32)
    assert torch.equal(product(A, B, config=SMALL._replace(group=group)), product(A, B))


def test_numbers_and_tensors_on_the_device_give_the_same_bits():
    A, B = operands("contiguous", 1, 40, 33, torch.float32)
    D = symmetric(1, 40)
    assert torch.equal(product(A, B, D, EPILOGUES["tensors"][1]), product(A, B, D, EPILOGUES["numbers"][1]))


def test_a_nan_stays_in_its_matrix_row_and_column():
    A, _ = operands("contiguous", 3, 70, 45, torch.float32)
    clean = product(A, A.mT)
    A[1, 40, 3] = math.nan
    C = product(A, A.mT)
    hit = torch.zeros(3, 70, 70, dtype=torch.bool)
    hit[1, 40, :] = hit[1, :, 40] = True
    assert torch.equal(C.isnan(), hit)
    assert torch.equal(C[~hit], clean[~hit])


def test_a_sum_of_no_terms_leaves_the_addend():
    A, D = torch.empty(2, 40, 0), symmetric(2, 40)
    assert torch.equal(product(A, A.mT, D, (ALPHA, BETA)), torch.tensor(BETA) * D)
    assert torch.equal(product(A, A.mT), torch.zeros(2, 40, 40))


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (0, 0, 0)], ids=str)
def test_no_matrices_and_no_rows_are_no_work(shape):
    A = torch.empty(shape)
    assert product(A, A.mT).shape == (shape[0], shape[1], shape[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_descriptors_and_pointers_give_the_same_bits(dtype, monkeypatch):
    """Operands are whole numbers: their sums are exact, in whatever order numpy takes views and copies."""
    X = normal(2, 72, 40, dtype=dtype).mul_(16).round_()
    Y = X.mT.contiguous().mT
    pairs = [(X, X.mT), (Y, Y.mT), (X, Y.mT), (X[:, :33], X[:, :33].mT), (X[1:, :, :33], X[1:, :, :33].mT)]
    by_pointers = [product(A, B) for A, B in pairs]
    seen = []
    describe = SYMMETRIC_GEMM._describe
    monkeypatch.setattr(SYMMETRIC_GEMM, "reads_descriptors", lambda device: True)
    monkeypatch.setattr(SYMMETRIC_GEMM, "_describe", lambda *args: seen.append(args) or describe(*args))
    assert all(torch.equal(product(A, B), C) for (A, B), C in zip(pairs, by_pointers))
    assert len(seen) == 2 * len(pairs)


# Places past 2**31 elements, along each dimension in turn: shape, strides in elements.
FAR = {
    "batch": ((2, 5, 5), (2**31, 5, 1)),
    "rows": ((1, 33, 33), (0, 2**26, 1)),
    "columns": ((1, 33, 33), (0, 1, 2**26)),
}


@pytest.mark.parametrize("config", [SMALL, SMALL._replace(tile_k=64)], ids=["in steps", "in one step"])
@pytest.mark.parametrize("far", FAR)
def test_offsets_need_more_than_31_bits(far, config, tmp_path):
    """A file with a hole in it has room for them and takes no more than the pages that are written."""
    shape, strides = FAR[far]
    pages = [tmp_path / name for name in "ADC"]
    A, D, C = (torch.from_file(str(p), True, 2**31 + 2**21, dtype=torch.float16) for p in pages)
    for page in pages:
        page.unlink()
    A, D, C = (x.as_strided(shape, strides) for x in (A, D, C))
    X = A.copy_(normal(*shape)).contiguous()
    Y = D.copy_(symmetric(*shape[:2])).contiguous()
    assert torch.equal(product(A, A.mT, D, (ALPHA, BETA), C, config), product(X, X.mT, Y, (ALPHA, BETA), config=config))
