"""The compiled product for Hopper, its own code run on the CPU in random orders; tests/hopper_model has the model."""

from __future__ import annotations

import pytest
import torch

from tests.support import hopper_model
from tests.support.hopper_model import Omitted, Scalars, Way
from tests.support.proofs import products

HALVES = (torch.float16, torch.bfloat16)
SQUARE = 256
# Less than a square, two that are cut, three with a last one of 8 rows; of k, one tile, several, one that is cut.
SIZES = ((24, 64), (328, 200), (520, 8))
CLUSTERS = (1, 2, 5)
# (m, k) whose squares are cut, if the call is split: one into two, one into four, three into three uneven sections.
CUT = ((24, 2048), (24, 4096), (328, 2504))
AT_ONCE = 66  # clusters of an H100


@pytest.fixture(scope="module", autouse=True)
def model(repository, tmp_path_factory):
    hopper_model.build(repository, tmp_path_factory.mktemp("hopper"))


def integers(*shape: int, dtype: torch.dtype, most: int = 3) -> torch.Tensor:
    """Small integers, whose sums of products are exact in any order."""
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def symmetric(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    S = integers(*shape, dtype=dtype, most=9)
    return S.tril() + S.tril(-1).mT


def squares(count: int, m: int, k: int = 64) -> torch.Tensor:
    """Return (matrix, row, column) of each square of a call that is not split, in the order of the kernel."""
    found = hopper_model.sections(count, m, k, split=False)
    assert (found[:, 3:6] == torch.tensor([0, 1, 0])).all()  # each is one section
    assert (found[:, 6] == 0).all() and (found[:, 7] == -(-k // 64)).all()
    return found[:, :3]


@pytest.mark.parametrize("side", range(1, 41))
def test_each_square_on_and_below_the_diagonal_is_computed_once(side):
    found = squares(2, side * SQUARE).tolist()
    wanted = [[n, i, j] for n in range(2) for i in range(side) for j in range(i + 1)]
    assert sorted(found) == wanted


@pytest.mark.parametrize("m", [SQUARE * 300, SQUARE * 1000])
def test_large_triangles_are_whole_too(m):
    side = m // SQUARE
    _, rows, cols = squares(1, m).unbind(1)
    assert (rows >= cols).all() and rows.max() < side and cols.min() >= 0
    assert torch.unique(rows.long() * side + cols).numel() == side * (side + 1) // 2


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


@pytest.mark.parametrize("side", [1, 2, 4, 8, 11, 12, 16, 20, 32])
@pytest.mark.parametrize("k", [8, 2048, 2056, 16384])
def test_sections_of_a_square_are_its_tiles_in_their_order(side, k):
    """The squares and their order stay. Those that are cut are the last ones, too few for all clusters."""
    found = hopper_model.sections(2, side * SQUARE, k)
    cut = found[found[:, 4] > 1]
    assert torch.equal(found[found[:, 3] == 0][:, :3], squares(2, side * SQUARE))
    for square in found[found[:, 3] == 0].tolist():
        same = found[(found[:, :3] == torch.tensor(square[:3])).all(1)]
        section, sections, numbers, first, count = same[:, 3:].unbind(1)
        assert section.tolist() == list(range(square[4])) and (sections == square[4]).all()
        assert (count > 0).all() and len(set(numbers.tolist())) == 1
        assert first.tolist() == [0, *count.cumsum(0)[:-1].tolist()] and count.sum() == -(-k // 64)
    last = side * (side + 1) // 2 % AT_ONCE
    assert cut[:, 5].unique().tolist() == list(range(2 * last if len(cut) else 0))
    assert not len(cut) or (found[: len(found) // 2][-last * int(cut[0, 4]) :, 4] > 1).all()


def test_squares_are_cut_where_that_leaves_fewer_clusters_idle():
    """By the model of the time that moving sums takes. 8192 rows have 8 x 66 squares, so that none is idle."""

    def sections(m: int, k: int) -> int:
        return int(hopper_model.sections(1, m, k)[:, 4].max())

    assert [sections(m, 4 * m) for m in (1024, 2048, 4096, 8192)] == [4, 3, 7, 1]
    assert [sections(m, m) for m in (1024, 2048, 4096, 8192)] == [1, 1, 4, 1]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("m, k", SIZES)
@pytest.mark.parametrize("clusters", CLUSTERS)
def test_products_of_integers_are_exact_in_every_order_of_events(dtype, m, k, clusters):
    A, D = integers(2, m, k, dtype=dtype), symmetric(2, m, m, dtype=dtype)
    wanted = (0.5 * A.double() @ A.double().mT + 2 * D.double() + 3 * torch.eye(m)).to(dtype)
    for seed in range(3):
        C = hopper_model.product(A, A.mT, D, Scalars(0.5, 2.0, 3.0), Way(clusters, clusters, seed))
        assert torch.equal(C, wanted)


@pytest.mark.parametrize("m, k", CUT)
@pytest.mark.parametrize("clusters, together", [(1, 1), (5, 1), (5, 5), (4, 2)])
def test_sums_of_sections_are_exact_however_few_clusters_run_at_one_time(m, k, clusters, together):
    A, D = integers(2, m, k, dtype=torch.float16), symmetric(2, m, m, dtype=torch.float16)
    wanted = (0.5 * A.double() @ A.double().mT + 2 * D.double() + 3 * torch.eye(m)).half()
    assert (hopper_model.sections(2, m, k)[:, 4] > 1).all()
    C = hopper_model.product(A, A.mT, D, Scalars(0.5, 2.0, 3.0), Way(clusters, together), split=True)
    assert torch.equal(C, wanted)


def test_a_split_matrix_has_the_same_bits_alone_in_a_batch_and_in_every_order_of_events():
    """Though its sums are rounded: sections are added in their order, whoever comes last.

    Less the rounded product, what remains shows the last bits of float32 sums.
    """
    A = torch.randn(2, 24, 4096, generator=torch.Generator().manual_seed(0)).half()
    less = Scalars(beta=-1.0)
    rounded = hopper_model.product(A, A.mT)
    rest = torch.cat([hopper_model.product(X, X.mT, D, less, split=True) for X, D in zip(A.split(1), rounded.split(1))])
    for seed in range(3):
        assert torch.equal(hopper_model.product(A, A.mT, rounded, less, Way(3, 3, seed), split=True), rest)
    assert not torch.equal(hopper_model.product(A, A.mT, rounded, less), rest)  # sums in another order


@pytest.mark.parametrize("c", [False, True])
@pytest.mark.parametrize("a, b", [(False, False), (False, True), (True, False)])
def test_operands_and_result_may_have_columns_as_runs(a, b, c):
    """Of a product which is symmetric without B being Aᵀ."""
    S = symmetric(2, 264, 264, dtype=torch.float16) / 8
    A, B = S.mT.contiguous().mT if a else S, (S @ S).mT.contiguous().mT if b else S @ S
    C = torch.empty_like(S.mT.contiguous().mT if c else S)
    torch.ops.hopper_model.product(C, A, B, None, *Scalars(), False, *Way())
    products.check_product(C, A, B)


def test_where_operands_only_commute_both_halves_are_one():
    """Here they do not even that, so that the other half is seen to be left out: it is a mirror image."""
    A, B = integers(1, 328, 72, dtype=torch.float16), integers(1, 72, 328, dtype=torch.float16)
    C, full = hopper_model.product(A, B), (A.float() @ B.float()).half()
    assert torch.equal(C, full.tril() + full.tril(-1).mT)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("size, split", [((272, 208), False), ((40, 2056), True)])
def test_it_passes_the_proof_that_a_gpu_asks_of_it(dtype, size, split):
    def compute(A, B, D, scalars):
        return hopper_model.product(A, B, D, scalars, split=split)

    products.prove_launch(compute, torch.empty(0, dtype=dtype), size)


@pytest.mark.parametrize(
    "omitted", [what for what in Omitted if what is not Omitted.NOTHING], ids=lambda what: what.name
)
def test_each_wait_is_needed(omitted):
    """Without one of them some order of events gives another result, or touches memory of a block that has ended."""
    split = omitted is Omitted.ARRIVE
    A = integers(2, *((24, 2048) if split else (328, 72)), dtype=torch.float16)
    wanted = (A.float() @ A.float().mT).half()

    def goes_wrong(way: Way) -> bool:
        try:
            return not torch.equal(hopper_model.product(A, A.mT, way=way, split=split), wanted)
        except RuntimeError as error:
            return "after its end" in str(error)

    assert any(goes_wrong(Way(seed=seed, omitted=omitted)) for seed in range(20))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda o: o.update(A=o["A"].float()), "float16 or bfloat16"),
        (lambda o: o.update(A=o["A"][:, :, :0]), "0 < k"),
        (lambda o: o.update(A=o["A"][:, :12]), "multiple of 8"),
        (lambda o: o.update(B=o["B"][:, :, :8]), r"B must be \(2, 24, 16\)"),
        (lambda o: o.update(B=o["B"].bfloat16()), "B must be Half like A"),
        (lambda o: o.update(C=o["C"][:, :8]), r"C must be \(2, 16, 16\)"),
        (lambda o: o.update(D=o["C"]), "must not share memory"),
        (lambda o: o.update(A=torch.zeros(2, 16, 28).half()[:, :, :24]), "A must have a stride of 1"),
        (lambda o: o.update(A=torch.zeros(2 * 16 * 24 + 1).half()[1:].view(2, 16, 24)), "modulo 16"),
        (lambda o: o.update(A=o["A"][:1].expand(2, 16, 24)), "multiples of 16 bytes"),
        (
            lambda o: o.update(A=torch.ones(2, 24, 16).half().mT, B=torch.ones(2, 16, 24).half().mT),
            "runs along m needs B",
        ),
        (lambda o: o.update(D=torch.zeros(2, 16, 20).half()[:, :, :16]), "D must have a stride of 1"),
    ],
)
def test_what_does_not_fit_raises_and_nothing_is_written(change, message):
    A = torch.ones(2, 16, 24).half()
    operands = {"C": torch.full((2, 16, 16), 7.0).half(), "A": A, "B": A.mT, "D": None}
    change(operands)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.hopper_model.product(*operands.values(), *Scalars(), False, *Way())
    assert (operands["C"] == 7).all()


def test_nothing_to_do_is_done():
    for count, m in ((0, 16), (2, 0)):
        A = torch.empty(count, m, 8).half()
        assert hopper_model.product(A, A.mT).numel() == 0
