"""Laws of the tiles' order, on a GPU and in Triton's interpreter, and of that interpreter."""

from __future__ import annotations

import sys

import pytest
import torch

np = pytest.importorskip("numpy")
triton = pytest.importorskip("triton")
tl = triton.language
interpreter = pytest.importorskip("triton.runtime.interpreter")

pytestmark = pytest.mark.usefixtures("place")
interpreter_alone = pytest.mark.parametrize("place", ["interpreter"], indirect=True)

# Kernels find by name, among the globals of their module, what they call.
grouped_lower_triangle = lower_triangle = None


@pytest.fixture(autouse=True)
def walks(kernel, monkeypatch):
    """Put the package's functions in their places."""
    for name in ("grouped_lower_triangle", "lower_triangle"):
        monkeypatch.setattr(sys.modules[__name__], name, getattr(kernel.kernels.gpu.tiles, name))


@triton.jit
def _walk(places, side, GROUP: tl.constexpr, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    count = side * (side + 1) // 2
    i, j = grouped_lower_triangle(tl.minimum(index, count - 1), side, GROUP)
    tl.store(places + 2 * index, i, mask=index < count)
    tl.store(places + 2 * index + 1, j, mask=index < count)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 16])
def test_a_walk_visits_each_tile_of_the_triangle_once(group):
    for side in [*range(1, 21), 40]:
        places = torch.full((side * (side + 1) // 2, 2), -1, dtype=torch.int32)
        _walk[(1,)](places, side, GROUP=group, COUNT=1024)
        visited = [tuple(place) for place in places.tolist()]
        assert sorted(visited) == [(i, j) for i in range(side) for j in range(i + 1)]


@triton.jit
def _rows(index, rows, COUNT: tl.constexpr):
    each = tl.arange(0, COUNT)
    i, _ = lower_triangle(tl.load(index + each))
    tl.store(rows + each, i)


@interpreter_alone
@pytest.mark.parametrize("ulps", [-2, 0, 2])
def test_an_inexact_root_finds_both_ends_of_each_row(ulps, monkeypatch):
    """Up to 45,056 rows, with indices of 30 bits; in tiles of 64 these are 2.9 million rows of a matrix.

    The square root of GPUs is off by up to one ulp, that of the interpreter by half of one.
    """
    inexact = np.float32(1 + ulps * 2**-23)
    root = interpreter.InterpreterBuilder.create_sqrt
    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "create_sqrt",
        lambda self, x: interpreter.TensorHandle(root(self, x).data * inexact, x.dtype),
    )
    i = torch.arange(2**15 + 2**13 + 2**12, dtype=torch.int32)
    for index in i * (i + 1) // 2, i * (i + 3) // 2:
        rows = torch.empty_like(i)
        for part in range(0, len(i), 2**12):
            _rows[(1,)](index[part:], rows[part:], COUNT=2**12)
        assert torch.equal(rows, i)


@triton.jit
def _round(x, y, COUNT: tl.constexpr):
    each = tl.arange(0, COUNT)
    tl.store(y + each, tl.load(x + each).to(y.dtype.element_ty))


@interpreter_alone
def test_the_repaired_interpreter_rounds_as_torch_does():
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    bits[:2048] &= -(2**15)  # ties among the low bits that are dropped
    x, y = bits.view(torch.float32), torch.empty(4096, dtype=torch.bfloat16)
    _round[(1,)](x, y, COUNT=4096)
    torch.testing.assert_close(y, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


@triton.jit
def _square(x, y, TILE: tl.constexpr):
    places = tl.arange(0, TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    tile = tl.load(x + places)
    tl.store(y + places, tl.dot(tile, tile))


@interpreter_alone
def test_the_repaired_interpreter_multiplies_values():
    x, y = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.empty(16, 16)
    _square[(1,)](x, y, TILE=16)
    torch.testing.assert_close(y, x.float() @ x.float(), rtol=0, atol=16 * 2**-24 * 16)


@triton.jit
def _write_the_same_place(out):
    tl.store(out, tl.program_id(0) + 2 * tl.program_id(1))


@triton.jit
def _write_all_but_one(out, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(out + index, index.to(tl.float32), mask=index != 3)


@pytest.mark.every_run
@interpreter_alone
def test_programs_run_in_an_order_that_follows_from_a_seed():
    """The last of eight is the same one for 20 seeds with a chance of 8^-19."""
    from tests.support.triton_interpreter import shuffle_programs

    runs = []
    for seed in [*range(20)] * 2:
        shuffle_programs(seed)
        out = torch.zeros(1, dtype=torch.int32)
        _write_the_same_place[(2, 4)](out)
        runs.append(int(out))
    assert runs[:20] == runs[20:] and len(set(runs)) > 1


@interpreter_alone
def test_an_element_that_nobody_writes_is_a_nan():
    out = torch.empty(8)
    _write_all_but_one[(1,)](out, 8)
    assert out.isnan().nonzero().flatten().tolist() == [3]
