"""Of which matrices ranks sum Gram matrices, and which of them share a batch."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support import inside
from tests.support.allocations import Allocations
from tests.support.refusals import error_of
from tests.support.sharded_models import LAYOUTS, Case, Spec, muon, part_of, set_gradient_parts


def on_ranks(kernel, shape, mesh, splits, device="cuda", number=0, **options):
    """Return the matrices of a parameter that is laid out on a mesh in this way, for plans of sums."""
    ranks = range(math.prod(mesh))
    view = inside.matrix_view(kernel, shape, stacked=len(shape) > 2, **options)
    shards = inside.shards(kernel, view, inside.layout(kernel, shape, mesh, ranks, splits))
    matrices = [inside.matrix(kernel, number, index, shards) for index in range(len(view.shapes))]
    for matrix in matrices:
        vars(matrix.parameter).update(family="one", device=torch.device(device), sharers=tuple(ranks))
        matrix.parameter.schedule = kernel.schedules.resolve_schedule("polar_express", 5)
        matrix.parameter.circumstances = kernel.kernels.circumstances.ALONE
    return matrices


def batches_of(kernel, matrices, rank=0):
    """Return the keys of the matrices of each batch that a rank sums."""
    (batches,) = kernel.plan.gram_sums.plan_sums(matrices, rank, None)
    return [[matrix.key for matrix in batch.matrices] for batch in batches]


@pytest.mark.parametrize("windows", [1, 2])
@pytest.mark.parametrize("share, is_summed", [(0.9, False), (1.1, True)])
@pytest.mark.parametrize("cut, ranks", [("columns", 4), ("rows", 8), ("experts", 2)])
def test_ranks_sum_where_that_sends_less(kernel, cut, ranks, share, is_summed, windows):
    """That is from n = 2 m R on, where R ranks have parts, since products of such small matrices cost next to nothing.

    In float32 there is one window, in which a rank sends m² numbers of four bytes twice, and in bfloat16 there are two.
    What R owners get and send back is 2 m n elements, counted as two bytes. Of an expert those ranks count that have a
    part of it.
    """
    m, n = 8, round(2 * 8 * ranks * share) * windows
    shape, mesh, splits = {
        "columns": ((m, n), [4], [(1, 1)]),
        "rows": ((n, m), [8], [(0, 1)]),
        "experts": ((2, m, n), [2, 2], [(0, 1), (2, 1)]),
    }[cut]
    matrix = on_ranks(kernel, shape, mesh, splits, device="cpu")[0]
    matrix.parameter.work_dtype = {1: torch.float32, 2: torch.bfloat16}[windows]
    assert (kernel.plan.gram_sums.as_summed(matrix) is not None) == is_summed


def test_ranks_that_sum_an_expert_are_in_rising_order(kernel):
    """By which their group is found, also where the mesh has another order."""
    view, ranks = inside.matrix_view(kernel, (2, 6, 400), stacked=True), (3, 0, 2, 1)
    shards = inside.shards(kernel, view, inside.layout(kernel, (2, 6, 400), [2, 2], ranks, [(0, 1), (2, 1)]))
    assert [inside.matrix(kernel, 0, index, shards).holders for index in range(2)] == [(0, 3), (1, 2)]


def test_experts_share_a_batch_of_sums(kernel):
    """Of which a rank has columns of each."""
    experts = on_ranks(kernel, (3, 6, 400), [4], [(2, 1)])
    assert batches_of(kernel, experts) == [[(0, 0), (0, 1), (0, 2)]]


def test_matrices_of_which_a_rank_has_unlike_parts_share_no_batch_of_sums(kernel):
    """They are of one size: columns in two orders, and neighbours in unlike runs of fused rows."""
    columns = [
        on_ranks(kernel, (6, 402), [2, 2], [(1, factor), (1, 1)], number=i)[0] for i, factor in enumerate((1, 2))
    ]
    rows = [
        on_ranks(kernel, (8, 2), [2], [(0, 1)], number=i, split_rows=r)[1] for i, r in enumerate(((4, 4), (2, 4, 2)))
    ]
    for one, other in columns, rows:
        assert (one.rows, one.cols) == (other.rows, other.cols)
        assert len(batches_of(kernel, [one, other])) == 2


def test_halves_of_fused_rows_share_no_batch_of_sums(kernel):
    """Of which a rank has rows of one alone; halves with one place do, of several parameters."""
    layout = inside.layout(kernel, (8, 2), [2], range(2), [(0, 1)])
    shards = inside.shards(kernel, inside.matrix_view(kernel, (8, 2), split_rows=(4, 4)), layout)
    halves = [inside.matrix(kernel, number, half, shards) for number in range(2) for half in range(2)]
    for matrix in halves:
        matrix.parameter.family = "one"
    keys = list(map(kernel.plan.gram_sums._batch_key, halves))
    assert keys[:2] == keys[2:] and keys[0] != keys[1]


@pytest.mark.parametrize(
    "device, packed, chunk_bytes, expected",
    [
        ("cuda", torch.float32, 1, [1, 1, 1]),
        ("cuda", torch.float32, 5000, [1, 2]),
        ("cuda", torch.bfloat16, 2400, [1, 2]),
        ("cuda", torch.float32, None, [3]),
        ("cpu", torch.float32, None, [1, 1, 1]),
    ],
)
def test_a_batch_of_sums_packs_at_most_chunk_bytes_or_one_matrix(kernel, device, packed, chunk_bytes, expected):
    """Of each a rank has 2,400 bytes in float32. On a CPU a batch is one matrix."""
    layout = inside.layout(kernel, (6, 400), [4], range(4), [(1, 1)])
    shards = inside.shards(kernel, inside.matrix_view(kernel, (6, 400)), layout)
    matrices = [inside.matrix(kernel, number, 0, shards) for number in range(3)]
    for matrix in matrices:
        vars(matrix.parameter).update(family="one", device=torch.device(device), packed_dtype=packed)
    (batches,) = kernel.plan.gram_sums.plan_sums(matrices, 0, chunk_bytes)
    assert [len(batch.matrices) for batch in batches] == expected


def test_matrices_of_unlike_families_share_no_batch_of_sums(kernel):
    """A batch has one momentum, one eps and one schedule."""
    layout = inside.layout(kernel, (6, 400), [4], range(4), [(1, 1)])
    shards = inside.shards(kernel, inside.matrix_view(kernel, (6, 400)), layout)
    matrices = [inside.matrix(kernel, number, 0, shards) for number in range(3)]
    for matrix, family in zip(matrices, ("one", "other", "one")):
        vars(matrix.parameter).update(family=family, device=torch.device("cuda"))
    (batches,) = kernel.plan.gram_sums.plan_sums(matrices, 0, None)
    assert [batch.matrices for batch in batches] == [(matrices[0], matrices[2]), (matrices[1],)]


def test_groups_of_ranks_sum_in_one_order_whatever_the_order_of_parameters(kernel):
    """Ranks that have several groups in common would else wait for one another."""
    matrices, view = [], inside.matrix_view(kernel, (6, 400))
    for number, ranks in enumerate([(0, 2), (0, 1), (0, 1, 2)]):
        shards = inside.shards(kernel, view, inside.layout(kernel, (6, 400), [len(ranks)], ranks, [(1, 1)]))
        matrices.append(inside.matrix(kernel, number, 0, shards))
        vars(matrices[-1].parameter).update(family="one", device=torch.device("cpu"))
    for order in matrices, matrices[::-1]:
        plan = kernel.plan.gram_sums.plan_sums(order, 0, None)
        assert [batches[0].ranks for batches in plan] == [(0, 1), (0, 1, 2), (0, 2)]


@pytest.mark.parametrize(
    "count, words",
    [
        (1, "1 matrix whose Gram matrix 4 ranks sum, 2 messages"),
        (2, "2 matrices whose Gram matrices 4 ranks sum, 2 messages"),
    ],
)
def test_it_is_said_how_many_matrices_how_many_ranks_sum(kernel, count, words):
    """In one batch: a message for norms, and one for the Gram matrices of a window."""
    cut = {"shape": (6, 400), "mesh": [4], "splits": [(1, 1)]}
    matrices = [on_ranks(kernel, device="cpu", number=number, **cut)[0] for number in range(count)]
    matrices = list(map(kernel.plan.gram_sums.as_summed, matrices))
    for matrix in matrices:
        vars(matrix.parameter).update(device=torch.device("cuda"))
    ((batch,),) = kernel.plan.gram_sums.plan_sums(matrices, 0, None)
    assert kernel.plan.gram_sums.sums_described([batch]) == words
    assert str(batch).endswith(", Gram matrices summed over 4 ranks")
    assert batch.names == ", ".join(f"layers.{number}.weight" for number in range(count))


def held_at_sums(kernel, case: Case) -> list[int]:
    """Return the bytes that a second step holds as it starts each sum, beside those that it began with."""
    params, held, real = [part_of(case, i) for i in range(len(case.specs))], [], dist.all_reduce
    optimizer = muon(kernel, case, params)
    for step in range(2):
        set_gradient_parts(case, params, step)
        with Allocations() as allocations:

            def counted(*arguments, seen=allocations, **options):
                held.append(seen.held)
                return real(*arguments, **options)

            with mock.patch.object(dist, "all_reduce", counted):
                optimizer.step()
    return held[-2:]


def test_a_rank_holds_its_parts_once_while_ranks_sum(pools):
    """Divided by their norms, while norms and Gram matrices are on their way; what it packed is freed before that."""
    part, small = 6 * 4000 // 4 * 4, 8 * 1024
    case = Case((Spec("up.weight", (6, 4000), LAYOUTS["columns"]),), {"sum_gram": True, "ns_dtype": "float32"})
    for norms, gram in pools(4).run(held_at_sums, case):
        assert part <= norms <= part + small and part <= gram <= part + small


def error_of_a_lost_sum(kernel, case: Case, when: str) -> str | None:
    """Return the error of a second step whose sums fail on all ranks, as they are sent or as they are waited for."""
    params, real, calls = [part_of(case, i) for i in range(len(case.specs))], dist.all_reduce, []
    optimizer = muon(kernel, case, params)

    def lost(*arguments, **options):
        calls.append(real(*arguments, **options))
        if len(calls) == 1:  # by which ranks agree about settings
            return calls[0]
        calls[-1].wait()
        if when == "send":
            raise RuntimeError("lost")
        return mock.Mock(wait=mock.Mock(side_effect=RuntimeError("lost")))

    for step in range(2):
        set_gradient_parts(case, params, step)
        with mock.patch.object(dist, "all_reduce", lost if step else real):
            error = error_of(optimizer.step)
    return error


@pytest.mark.parametrize("when", ["send", "wait"])
def test_an_error_of_a_sum_says_which_rank_waited_for_what(pools, when):
    case = Case((Spec("up.weight", (6, 400), LAYOUTS["columns"]),), {"sum_gram": True, "ns_dtype": "float32"})
    for rank, error in enumerate(pools(4).run(error_of_a_lost_sum, case, when)):
        assert error.startswith(f"rank {rank} failed while it waited for the other ranks' parts of up.weight: ")
        assert error.endswith("(lost)")
