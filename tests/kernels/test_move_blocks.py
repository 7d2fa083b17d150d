"""Blocks move between matrices and a buffer as by the strides of both, whatever dtype, strides, places and threads."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.support import oracles
from tests.support.operation_places import MODELLED, SHIPPED, on_every_place

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
SHAPES = (3, 40, 50), (2, 130, 200), (4, 7, 5000), (5, 200, 1), (5, 1, 200), (2, 64, 128)
MATRICES = {
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.mT.contiguous().mT,
    "sliced": lambda x: torch.cat([x, x, x], 2)[:, :, x.size(2) : 2 * x.size(2)],
    "every_other": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
}
DIRECTIONS = pytest.mark.parametrize("to_buffer", [False, True], ids=["to_matrices", "to_buffer"])

pytestmark = [pytest.mark.usefixtures("device"), on_every_place(SHIPPED, MODELLED)]


@pytest.fixture(scope="session")
def new_block(kernel):
    return kernel.plan.blocks.Block


def noise(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Return random bits, NaN of all kinds among them."""
    generator, bits = torch.Generator().manual_seed(seed), BITS[dtype]
    limits = torch.iinfo(bits)
    drawn = torch.randint(limits.min, limits.max, shape, generator=generator, dtype=bits, device="cpu")
    return drawn.to(torch.get_default_device()).view(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(BITS[a.dtype]), b.contiguous().view(BITS[b.dtype]))


def table(blocks: Sequence) -> Tensor:
    return torch.tensor(blocks, dtype=torch.int64, device="cpu").reshape(-1, 9)


def cuts(size: int, most: int, draw: random.Random) -> list[tuple[int, int]]:
    """Cut a dimension into up to `most` parts, empty ones among them."""
    edges = sorted(draw.randint(0, size) for _ in range(draw.randrange(most)))
    return list(zip([0, *edges], [*edges, size]))


def random_blocks(new_block, shape: Sequence[int], seed: int) -> tuple[list, int]:
    """Cut matrices into blocks, some of which are dropped, with gaps in the buffer, which has the size returned."""
    draw, blocks, size = random.Random(seed), [], draw_gap(random.Random(seed))
    for position, end in cuts(shape[0], 3, draw):
        for top, bottom in cuts(shape[1], 4, draw):
            for left, right in cuts(shape[2], 4, draw):
                count, rows, cols = end - position, bottom - top, right - left
                row_step = cols + draw_gap(draw)
                step = rows * row_step + draw_gap(draw)
                blocks.append(new_block(count, position, top, left, rows, cols, size, step, row_step))
                size += count * step + draw_gap(draw)
    draw.shuffle(blocks)
    return blocks[: max(1, len(blocks) * 3 // 4)], size


def draw_gap(draw: random.Random) -> int:
    return draw.choice([0, 0, 1, 3, 8])


def moved(op, matrices: Tensor, buffer: Tensor, blocks, to_buffer: bool) -> Tensor:
    """Return the written one of a copy of both, after checking that the other has not changed."""
    twins = torch.empty_strided(matrices.shape, matrices.stride(), dtype=matrices.dtype).copy_(matrices), buffer.clone()
    op(*twins, blocks, to_buffer)
    assert same_bits(twins[1 - to_buffer], (matrices, buffer)[1 - to_buffer])
    return twins[to_buffer]


@DIRECTIONS
@pytest.mark.parametrize("lie", MATRICES)
@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.many_blocks
def test_random_blocks_move_as_their_strides_say(move_blocks_, new_block, dtype, lie, to_buffer):
    """The whole of the target is compared, with what no block covers."""
    for seed, shape in enumerate(SHAPES * 3):
        blocks, size = random_blocks(new_block, shape, seed)
        matrices, buffer = MATRICES[lie](noise(shape, dtype, seed)), noise((size,), dtype, seed + 100)
        expected = moved(oracles.move_blocks, matrices, buffer, blocks, to_buffer)
        assert same_bits(moved(move_blocks_, matrices, buffer, table(blocks), to_buffer), expected), (shape, seed)


@pytest.mark.kernels_ci
@DIRECTIONS
@pytest.mark.parametrize("lie", MATRICES)
def test_blocks_start_wherever_they_do(move_blocks_, new_block, lie, to_buffer):
    """Every place of both within 16 bytes, and rows around as long as that."""
    matrices, buffer = MATRICES[lie](noise((2, 9, 40), torch.bfloat16, 0)), noise((900,), torch.bfloat16, 1)
    for left in range(9):
        for offset in range(9):
            for cols, row_step in ((7, 7), (8, 8), (9, 11), (24, 24)):
                blocks = [new_block(2, 0, 1, left, 7, cols, offset, 7 * row_step + 3, row_step)]
                expected = moved(oracles.move_blocks, matrices, buffer, blocks, to_buffer)
                assert same_bits(moved(move_blocks_, matrices, buffer, table(blocks), to_buffer), expected)


@DIRECTIONS
@pytest.mark.parametrize("lie", MATRICES)
@pytest.mark.parametrize("size", [(300, 100), (2, 20_000), (3000, 7)], ids=str)
@pytest.mark.many_blocks
def test_blocks_of_many_tiles_move(move_blocks_, new_block, size, lie, to_buffer):
    """As one run of memory, as rows that are runs, and whole matrices one behind the other."""
    rows, cols = size
    for gap in 0, 5:
        for wider in 0, 3:
            shape, step = (2, rows, cols + wider), rows * (cols + gap)
            matrices, buffer = MATRICES[lie](noise(shape, torch.bfloat16, 0)), noise((2 * step,), torch.bfloat16, 1)
            blocks = [new_block(2, 0, 0, wider, rows, cols, 0, step, cols + gap)]
            expected = moved(oracles.move_blocks, matrices, buffer, blocks, to_buffer)
            assert same_bits(moved(move_blocks_, matrices, buffer, table(blocks), to_buffer), expected)


@DIRECTIONS
def test_a_single_row_longer_than_a_tile_moves(move_blocks_, new_block, to_buffer):
    matrices, buffer = noise((1, 1, 5000), torch.bfloat16, 0), noise((5000,), torch.bfloat16, 1)
    blocks = [new_block(1, 0, 0, 3, 1, 4990, 5, 4990, 4990)]
    expected = moved(oracles.move_blocks, matrices, buffer, blocks, to_buffer)
    assert same_bits(moved(move_blocks_, matrices, buffer, table(blocks), to_buffer), expected)


@pytest.mark.kernels_ci
@DIRECTIONS
def test_a_message_that_starts_inside_of_its_memory_moves(move_blocks_, new_block, to_buffer):
    matrices, buffer = noise((6, 20, 30), torch.float32, 0)[2:5], noise((2000,), torch.float32, 1)[101:]
    blocks = [new_block(3, 0, 2, 5, 11, 13, 7, 150, 13)]
    expected = moved(oracles.move_blocks, matrices, buffer, blocks, to_buffer)
    assert same_bits(moved(move_blocks_, matrices, buffer, table(blocks), to_buffer), expected)


@DIRECTIONS
@pytest.mark.parametrize("lie", ["contiguous", "transposed"])
def test_a_list_longer_than_a_launch_moves(move_blocks_, new_block, lie, to_buffer):
    """A launch of a GPU takes 640 blocks; each of these has a column or two, and every seventh is empty."""
    places = [(i, 0 if i % 7 == 0 else 1 + i % 2) for i in range(1500)]
    blocks = [new_block(2, 0, 0, 2 * i, 9, cols, 40 * i, 9 * cols, cols) for i, cols in places]
    matrices, buffer = MATRICES[lie](noise((2, 9, 3000), torch.float16, 0)), noise((60_000,), torch.float16, 1)
    expected = moved(oracles.move_blocks, matrices, buffer, blocks, to_buffer)
    assert same_bits(moved(move_blocks_, matrices, buffer, table(blocks), to_buffer), expected)


@DIRECTIONS
def test_threads_do_not_change_a_bit(move_blocks_, new_block, to_buffer):
    shape = (3, 300, 500)
    blocks, size = random_blocks(new_block, shape, 5)
    for lie in MATRICES.values():
        matrices, buffer, results = lie(noise(shape, torch.bfloat16, 0)), noise((size,), torch.bfloat16, 1), []
        for count in 1, 2:
            torch.set_num_threads(count)
            results.append(moved(move_blocks_, matrices, buffer, table(blocks), to_buffer))
        assert same_bits(*results)


@pytest.mark.kernels_ci
@DIRECTIONS
def test_no_blocks_and_empty_ones_do_nothing(move_blocks_, new_block, to_buffer):
    """Such as an empty one at the end of everything, or that starts nowhere in a buffer."""
    matrices, buffer = noise((2, 3, 4), torch.float32, 0), noise((24,), torch.float32, 1)
    empty = [
        new_block(0, 2, 0, 0, 3, 4, 0, 12, 4),
        new_block(2, 0, 3, 0, 0, 4, 24, 0, 0),
        new_block(2, 0, 0, 4, 3, 0, 99, 9, 9),
    ]
    for blocks in [], empty:
        assert same_bits(moved(move_blocks_, matrices, buffer, table(blocks), to_buffer), (matrices, buffer)[to_buffer])
    for shape in (0, 3, 4), (2, 0, 4), (2, 3, 0):
        move_blocks_(torch.zeros(shape), torch.zeros(0), table([]), to_buffer)


@pytest.mark.kernels_ci
def test_elements_that_blocks_write_twice_get_one_of_the_values(move_blocks_, new_block):
    matrices, buffer = torch.arange(24.0).view(2, 3, 4), torch.zeros(40)
    blocks = [new_block(2, 0, 0, 0, 3, 4, 0, 0, 4), new_block(2, 0, 0, 0, 3, 4, 16, 4, 0)]
    move_blocks_(matrices, buffer, table(blocks), True)
    same_place, same_row = buffer[:12].view(3, 4), buffer[16:24].view(2, 4)
    assert ((same_place == matrices[0]) | (same_place == matrices[1])).all()
    assert (same_row.unsqueeze(1) == matrices).any(1).all() and buffer[24:].count_nonzero() == 0


def test_rows_that_are_one_and_the_same_move(kernel, device):
    """Where rows of the buffer, or of the matrices that are read, are one row: more of them than a tile has."""
    move_blocks_, count = kernel.kernels.native.move_blocks_, 5000
    matrices, buffer = torch.zeros(1, count, 3)[:, :, :2], torch.arange(10.0)
    move_blocks_(matrices, buffer, torch.tensor([[1, 0, 0, 0, count, 2, 1, 0, 0]], device="cpu"), False)
    assert torch.equal(matrices, buffer[1:3].expand(1, count, 2))
    same, rows = torch.tensor([[[1.0, 2.0]]]).expand(1, count, 2), torch.zeros(count, 3)
    move_blocks_(same, rows.view(-1), torch.tensor([[1, 0, 0, 0, count, 2, 0, 0, 3]], device="cpu"), True)
    assert torch.equal(rows, torch.tensor([1.0, 2.0, 0.0]).expand(count, 3))
