"""The compiled product for Hopper, its own code run on the CPU in random orders; tests/hopper_model has the model."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import Interpreter
from tests.support import hopper_model
from tests.support.hopper_model import USUAL, Omitted, Scalars, Way
from tests.support.proofs import products

HALF_DTYPES = (torch.float16, torch.bfloat16)
SQUARE = 256
# Less than a square, two that are cut, three with a last one of 8 rows; of k, one tile, several, one that is cut.
SIZES = ((24, 64), (328, 200), (520, 8))
CLUSTERS = (1, 2, 5)
# (m, k, sections): one square in sections of one tile and of two, three squares in as many sections as tiles.
CUT = ((24, 200, 3), (328, 136, 5))
AT_ONCE = 66  # clusters of an H100

pytestmark = pytest.mark.usefixtures("hopper_operations")


def integers(*shape: int, dtype: torch.dtype, most: int = 3) -> torch.Tensor:
    """Small integers, whose sums of products are exact in any order."""
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def symmetric(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    S = integers(*shape, dtype=dtype, most=9)
    return S.tril() + S.tril(-1).mT


def squares(count: int, m: int, k: int = 64) -> torch.Tensor:
    """Return (matrix, row, column) of each square of a call that is not split, in the order of the kernel."""
    rows = hopper_model.sections(count, m, k, into=1)
    assert (rows[:, 3:6] == torch.tensor([0, 1, 0])).all()  # each is one section
    assert (rows[:, 6] == 0).all() and (rows[:, 7] == -(-k // 64)).all()
    return rows[:, :3]


@pytest.mark.parametrize("side", range(1, 41))
def test_each_square_on_and_below_the_diagonal_is_computed_once(side):
    positions = squares(2, side * SQUARE).tolist()
    wanted = [[n, i, j] for n in range(2) for i in range(side) for j in range(i + 1)]
    assert sorted(positions) == wanted


@pytest.mark.parametrize("m", [SQUARE * 300, SQUARE * 1000])
def test_large_triangles_are_whole_too(m):
    side = m // SQUARE
    _, rows, cols = squares(1, m).unbind(1)
    assert (rows >= cols).all() and rows.max() < side and cols.min() >= 0
    assert torch.unique(rows.long() * side + cols).numel() == side * (side + 1) // 2


def test_the_row_of_each_index_is_found_in_triangles_of_any_side():
    """Of the first and the last of each row: the root of what float32 does not hold may be that of another row."""
    ends = torch.arange(1, 46341).cumsum(0)
    assert torch.equal(hopper_model.triangle_rows(ends - 1), torch.arange(46340, dtype=torch.int32))
    assert torch.equal(hopper_model.triangle_rows(ends[:-1]), torch.arange(1, 46340, dtype=torch.int32))


@pytest.mark.parametrize("side", [1, 7, 8, 9, 30])
def test_the_order_of_squares_depends_neither_on_batch_nor_on_the_last_rows(side):
    alone = squares(1, side * SQUARE)[:, 1:]
    batch = squares(3, side * SQUARE - SQUARE + 8)
    assert torch.equal(batch[:, 0], torch.arange(3, dtype=torch.int32).repeat_interleave(len(alone)))
    assert torch.equal(batch[:, 1:], alone.repeat(3, 1))


@pytest.mark.parametrize("side", [32, 64, 128])
def test_squares_at_work_together_share_panels(side):
    """Those at work at 8 rows by 9 columns have 17 panels, and a few more at the seam of two groups.

    Row by row it would be as many as `side`.
    """
    order = squares(1, side * SQUARE)[:, 1:].tolist()
    parts = [order[first : first + AT_ONCE] for first in range(0, len(order) - AT_ONCE, AT_ONCE)]
    assert max(len({panel for square in part for panel in square}) for part in parts) <= 23 < side


@pytest.mark.parametrize("side", [1, 2, 8, 11, 12, 20, 32])
@pytest.mark.parametrize("k, into", [(8, 5), (2048, 3), (2056, 8), (16384, 5)])
def test_sections_of_a_square_are_its_tiles_in_their_order(kernel, side, k, into):
    """The squares and their order stay. Those that are cut are the last ones, too few for all clusters."""
    rows, tiles = hopper_model.sections(2, side * SQUARE, k, into), -(-k // 64)
    last, into = side * (side + 1) // 2 % AT_ONCE, min(into, tiles)
    assert kernel.kernels.gpu.hopper_gemm.cuts(side * SQUARE) is (last > 0)
    assert torch.equal(rows[rows[:, 3] == 0][:, :3], squares(2, side * SQUARE))
    numbers, same, behind = [], None, 0
    for *square, section, sections, number, first, count in rows.tolist():
        if section == 0:
            same, behind = square, 0
        assert square == same and first == behind and count > 0
        behind += count
        if section == sections - 1:
            assert behind == tiles
            numbers += [number] if sections > 1 else []
    assert numbers == list(range(2 * last if into > 1 else 0))
    of_matrix = rows[: len(rows) // 2, 4].tolist()
    assert of_matrix == [1] * (side * (side + 1) // 2 - last) + [into] * last * into


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("m, k", SIZES)
@pytest.mark.parametrize("clusters", CLUSTERS)
def test_products_of_integers_are_exact_in_every_order_of_events(dtype, m, k, clusters):
    A, D = integers(2, m, k, dtype=dtype), symmetric(2, m, m, dtype=dtype)
    wanted = (0.5 * A.double() @ A.double().mT + 2 * D.double() + 3 * torch.eye(m)).to(dtype)
    for seed in range(3):
        C = hopper_model.product(A, A.mT, D, Scalars(0.5, 2.0, 3.0), Way(clusters, clusters, seed))
        assert torch.equal(C, wanted)


@pytest.mark.parametrize("m, k, sections", CUT)
@pytest.mark.parametrize("clusters, together, piece", [(1, 1, 2), (5, 1, 2), (3, 3, 2), (4, 2, 1)])
def test_sums_of_sections_are_exact_however_few_clusters_run_at_one_time(m, k, sections, clusters, together, piece):
    A, D = integers(2, m, k, dtype=torch.float16), symmetric(2, m, m, dtype=torch.float16)
    wanted = (0.5 * A.double() @ A.double().mT + 2 * D.double() + 3 * torch.eye(m)).half()
    way = Way(clusters, together, piece=piece)
    assert torch.equal(hopper_model.product(A, A.mT, D, Scalars(0.5, 2.0, 3.0), way, sections), wanted)


def test_a_matrix_in_sections_has_the_same_bits_alone_in_a_batch_and_in_every_order_of_events():
    """Though its sums are rounded: sections are added in their order, whoever comes last.

    Less the rounded product, what remains shows the last bits of float32 sums.
    """
    A = torch.randn(2, 24, 1024, generator=torch.Generator().manual_seed(0)).half()
    rounded, less = hopper_model.product(A, A.mT), Scalars(beta=-1.0)

    def rest(of: slice, sections: int = 4, way: Way = USUAL) -> torch.Tensor:
        return hopper_model.product(A[of], A[of].mT, rounded[of], less, way, sections)

    alone = torch.cat([rest(slice(0, 1)), rest(slice(1, 2))])
    for seed in range(3):
        assert torch.equal(rest(slice(2), way=Way(3, 3, seed)), alone)
    assert torch.equal(rest(slice(2), way=Way(3, 3, piece=1)), alone)
    assert not torch.equal(rest(slice(2), sections=1), alone)  # sums in another order


@pytest.mark.parametrize("clusters", [1, 4])
def test_sections_are_added_in_the_order_of_k(clusters):
    """2^24 + 1 is 2^24 in float32: of 2^24, 1, 1 and -2^24 the ones are lost in this order, and not in the opposite."""
    A, B = torch.zeros(1, 8, 256).half(), torch.zeros(1, 256, 8).half()
    A[:, :, ::64] = torch.tensor([4096.0, 1.0, 1.0, -4096.0])
    B[:, ::64] = A[:, :, ::64].mT.abs()
    assert (hopper_model.product(A, B, way=Way(clusters, clusters), sections=4) == 0).all()


@pytest.mark.parametrize("c", [False, True])
@pytest.mark.parametrize("a, b", [(False, False), (False, True), (True, False)])
def test_operands_and_result_may_have_columns_as_runs(a, b, c):
    """Of a product which is symmetric without B being Aᵀ."""
    S = symmetric(2, 264, 264, dtype=torch.float16) / 8
    A, B = S.mT.contiguous().mT if a else S, (S @ S).mT.contiguous().mT if b else S @ S
    C = torch.empty_like(S.mT.contiguous().mT if c else S)
    torch.ops.hopper_model.product(C, A, B, None, *Scalars(), 1, *Way())
    products.check_product(C, A, B)


def test_nothing_is_read_behind_an_addend(tmp_path):
    """To do so ends the process. Rows and columns of the last square are more than the matrix has."""
    D, A = Interpreter(tmp_path).guarded(symmetric(1, 328, 328, dtype=torch.float16)), torch.zeros(1, 328, 8).half()
    assert torch.equal(hopper_model.product(A, A.mT, D, Scalars(beta=1.0)), D)


def test_where_operands_only_commute_both_halves_are_one():
    """Here they do not even that, so that the other half is seen to be left out: it is a mirror image."""
    A, B = integers(1, 328, 72, dtype=torch.float16), integers(1, 72, 328, dtype=torch.float16)
    C, full = hopper_model.product(A, B), (A.float() @ B.float()).half()
    assert torch.equal(C, full.tril() + full.tril(-1).mT)


@pytest.mark.parametrize("dtype, size, sections", [(torch.float16, (272, 208), 1), (torch.bfloat16, (40, 208), 3)])
def test_it_passes_the_proof_that_a_gpu_asks_of_it(dtype, size, sections):
    def compute(A, B, D, scalars):
        return hopper_model.product(A, B, D, scalars, sections=sections)

    products.prove_launch(compute, products.operands_of(torch.empty(0, dtype=dtype), size))


WAITS = [(what, 1) for what in Omitted if what not in (Omitted.NOTHING, Omitted.FENCE)]
WAITS += [(what, 3) for what in (Omitted.FIRST_SYNC, Omitted.SECOND_SYNC, Omitted.FENCE)]


@pytest.mark.parametrize("omitted, sections", WAITS)
def test_each_wait_is_needed(omitted, sections):
    """Without one, some order of events gives another result, never ends, or touches memory of an ended block."""
    A = integers(2, *((24, 200) if sections > 1 else (328, 72)), dtype=torch.float16)
    wanted = (A.float() @ A.float().mT).half()

    def goes_wrong(way: Way) -> bool:
        try:
            return not torch.equal(hopper_model.product(A, A.mT, way=way, sections=sections), wanted)
        except RuntimeError as error:
            return "after its end" in str(error) or "nothing can go on" in str(error)

    assert any(goes_wrong(Way(sections, sections, seed, omitted)) for seed in range(20))
