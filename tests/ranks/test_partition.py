"""Work to owners: balanced within the bounds of largest-first scheduling, in chunks of bounded size."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any, NamedTuple
from unittest import mock

import pytest

from tests.support import inside
from tests.support.random_plans import Model

EVERYBODY = "everybody"


class Work(NamedTuple):
    """What owners and chunks have to know of a matrix."""

    cost: int
    part_size: int
    parts: int
    holders: Any = EVERYBODY


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64, 4096])
@pytest.mark.parametrize("seed", range(3))
def test_no_rank_exceeds_the_largest_first_bound(kernel, ranks, seed):
    draw = random.Random(seed)
    costs = [draw.choice([1, 5, 40, 41, 300, 7000]) * draw.randint(1, 9) for _ in range(draw.randint(1, 3 * ranks))]
    owners = kernel.plan.owners.Owners(ranks)
    taken = {}
    for cost in sorted(costs, reverse=True):
        taken.setdefault(owners.take(cost), []).append(cost)
    assert sorted(itertools.chain(*taken.values())) == sorted(costs)
    for share in taken.values():
        # When the last of a rank was given to it, no other had less: the least is at most the mean of the others'.
        assert sum(share) - share[-1] <= (sum(costs) - share[-1]) / ranks


@pytest.mark.parametrize("seed", range(20))
def test_largest_first_is_within_a_third_of_the_best(kernel, seed):
    draw = random.Random(seed)
    ranks, costs = draw.randint(2, 3), sorted((draw.randint(1, 30) for _ in range(7)), reverse=True)
    owners = kernel.plan.owners.Owners(ranks)
    for cost in costs:
        owners.take(cost)
    loads = (
        max(sum(c for c, r in zip(costs, choice) if r == rank) for rank in range(ranks))
        for choice in itertools.product(range(ranks), repeat=len(costs))
    )
    # Graham 1969, theorem 3: 4/3 - 1/(3 ranks).
    assert max(owners.loads) <= (4 / 3 - 1 / (3 * ranks)) * min(loads)


@pytest.mark.parametrize("ranks, matrices, per_chunk", [(4, 10, 3), (8, 100, 12), (64, 1000, 100), (5, 3, 1)])
def test_equal_matrices_are_spread_evenly(kernel, ranks, matrices, per_chunk):
    owners = kernel.plan.owners.Owners(ranks)
    items = [Work(7, 1, 1)] * matrices
    for positions in kernel.plan.owners.chunks_by_size(items, EVERYBODY, per_chunk):
        owners.next_chunk()
        taken = [owners.take(7) for _ in positions]
        counts = [taken.count(rank) for rank in range(ranks)]
        assert max(counts) - min(counts) <= 1
        assert max(owners.loads) - min(owners.loads) <= 7


def test_the_team_that_is_idle_first_works_and_its_least_loaded_rank_owns(kernel):
    owners = kernel.plan.owners.Owners(4)
    for rank, cost in ((0, 5), (2, 3), (3, 2)):
        owners.take(cost, [rank])
    assert owners.take_together(7, [(0, 1), (2, 3)]) == [3, 2]  # ranks 0 and 1 begin when rank 0 has ended
    assert owners.loads == [5, 0, 10, 9]
    assert owners.take(1) == 1  # of all ranks, the others of which have got work since they were idle


def test_no_rank_idles_in_a_chunk_because_it_did_most_in_the_ones_before(kernel):
    """A chunk takes as long as its busiest rank, so what a rank has done in others does not count."""
    matrices = [dataclasses.replace(m, cost=cost) for m, cost in zip(alike(kernel, 8, 8, 4, 2), (10, 4, 3, 3))]
    chunks, _ = inside.plan_messages(kernel, matrices, (0, 1), 0, 1)
    assert [sorted(each.owner for each in chunk.assignments) for chunk in chunks] == [[0, 1], [0, 1]]


@pytest.mark.parametrize("limit, least", [(1, 1), (1, 5), (30, 1), (30, 5), (10**6, 3)])
def test_chunks_are_full_to_the_limit_or_the_least_number(kernel, limit, least):
    draw = random.Random(limit + least)
    costs, sizes = [draw.randint(1, 50) for _ in range(40)], [draw.randint(1, 20) for _ in range(40)]
    items = [Work(cost, size, least) for cost, size in zip(costs, sizes)]
    chunks = list(kernel.plan.owners.chunks_by_size(items, EVERYBODY, limit))
    assert sorted(itertools.chain(*chunks)) == list(range(40))
    in_order = [costs[i] for i in itertools.chain(*chunks)]
    assert in_order == sorted(costs, reverse=True)
    for chunk, following in itertools.zip_longest(chunks, chunks[1:]):
        held = sum(sizes[i] for i in chunk)
        assert held <= limit or len(chunk) <= least
        assert not following or (len(chunk) >= least and held + sizes[following[0]] > limit)


@pytest.mark.parametrize("limit", [1, 30, 200])
def test_chunk_is_full_at_each_place(kernel, limit):
    draw = random.Random(limit)
    places, parts = 5, 3
    # Neighbours lie at the same place, as experts do.
    items = [Work(9, draw.randint(1, 20), parts, place) for place in range(places) for _ in range(12)]
    items += [Work(8, draw.randint(1, 20), parts) for _ in range(12)]
    chunks = list(kernel.plan.owners.chunks_by_size(items, EVERYBODY, limit))
    assert sorted(itertools.chain(*chunks)) == list(range(len(items)))
    for chunk in chunks:
        members = [items[i] for i in chunk]
        for place in range(places):
            here = [item for item in members if item.holders in (place, EVERYBODY)]
            kinds = len({item.holders for item in here})
            assert sum(item.part_size for item in here) <= limit or len(here) <= kinds * parts
    # Of the first chunk, nobody is idle.
    assert {items[i].holders for i in chunks[0]} >= set(range(places))


def test_a_chunk_is_full_where_most_is(kernel):
    """What all hold comes to what the fullest place has, which is not the last."""
    items = [Work(9, 10, 1, "here"), Work(9, 1, 1, "there"), *[Work(8, 5, 1)] * 3]
    assert list(kernel.plan.owners.chunks_by_size(items, EVERYBODY, 20)) == [[0, 1, 2, 3], [4]]


def test_places_take_turns_among_equals_however_much_larger_work_one_has(kernel):
    items = [Work(9, 1, 1, "here")] * 2 + [Work(8, 1, 1, "here")] * 2 + [Work(8, 1, 1, "there")] * 2
    assert list(kernel.plan.owners.chunks_by_size(items, EVERYBODY, 100)) == [[0, 1, 2, 4, 3, 5]]


@pytest.mark.parametrize("ranks", [2, 8, 64, 1024])
@pytest.mark.parametrize("megabytes, gigaflops", [(0.01, 1), (10, 100), (100, 3000), (1000, 60_000), (1000, 1), (0, 5)])
def test_useful_chunks_take_the_least_time(kernel, ranks, megabytes, gigaflops):
    """What is shorter of wire and products is hidden but for one chunk's share, and each chunk has its latency."""
    costs = kernel.plan.costs
    wire, products = 1e6 * megabytes / costs.BYTES_PER_SECOND, 1e9 * gigaflops / costs.FLOPS_PER_SECOND

    def seconds(chunks: int) -> float:
        hidden = min(wire, products) * (1 - 1 / chunks)
        return wire + products - hidden + 2 * chunks * (ranks - 1) * costs.SECONDS_PER_PEER

    useful = costs.useful_chunks(1e6 * megabytes, 1e9 * gigaflops, ranks)
    best = min(range(1, 400), key=seconds)
    # The continuous optimum, rounded, is next to the best whole number at most.
    assert abs(useful - best) <= 1
    assert seconds(useful) <= 1.03 * seconds(best)


# Rows, columns and how many matrices of the kind.
LLAMA_8B = [(4096, 4096, 64), (1024, 4096, 64), (14336, 4096, 64), (4096, 14336, 32)]
GPT_2 = [(2304, 768, 12), (768, 768, 12), (3072, 768, 12), (768, 3072, 12)]


def alike(kernel, rows: int, cols: int, count: int, ranks: int):
    """Return matrices of one size that so many ranks have rows of."""
    layout = inside.layout(kernel, (rows, cols), (ranks,), tuple(range(ranks)), ((0, 1),))
    shards = inside.shards(kernel, inside.matrix_view(kernel, (rows, cols)), layout)
    cost = kernel.plan.costs.owners_cost(rows, cols, 5)
    return [inside.matrix(kernel, i, 0, shards, cost) for i in range(count)]


def test_chunks_of_the_largest_models_have_256_mib(kernel):
    """Half a trillion float32 elements on 64 ranks would hide best in larger ones."""
    matrices = alike(kernel, 16384, 53248, 600, 64)
    assert kernel.plan.exchanges.chunk_elements(matrices, tuple(range(64)), None) == 2**28 // 4


@pytest.mark.parametrize("copies", [1, 2])
def test_there_are_as_many_chunks_as_are_useful(kernel, monkeypatch, copies):
    """Of 100 matrices each rank has an element, of whichever copy."""
    ranks = tuple(range(4 * copies))
    layout = inside.layout(kernel, (4, 1), (copies, 4), ranks, (None, (0, 1)))
    shards = inside.shards(kernel, inside.matrix_view(kernel, (4, 1)), layout)
    matrices = [inside.matrix(kernel, number, 0, shards) for number in range(100)]
    useful = mock.Mock(return_value=3)
    monkeypatch.setattr(kernel.plan.exchanges, "useful_chunks", useful)
    limit = kernel.plan.exchanges.chunk_elements(matrices, ranks, None)
    # Four bytes of each element go and come; of 100 matrices of cost 1, a rank works on as many as any other.
    assert useful.call_args.args == (100 * (4 + 4), 100 / len(ranks), len(ranks))
    assert len(inside.plan_messages(kernel, matrices, ranks, 0, limit)[0]) == 3


@pytest.mark.parametrize("model, ranks, least", [(GPT_2, 8, 4), (LLAMA_8B, 8, 16), (LLAMA_8B, 64, 3)])
@pytest.mark.parametrize("chunk_bytes", [None, 2**28])
def test_models_are_cut_into_chunks_that_overlap(kernel, model, ranks, least, chunk_bytes):
    """As many as there are matrices for all ranks, of the 224 of Llama 8B on 64; 256 MiB would be one chunk there."""
    everybody = tuple(range(ranks))
    matrices = []
    for size in model:
        matrices += alike(kernel, *size, ranks)
    limit = kernel.plan.exchanges.chunk_elements(matrices, everybody, chunk_bytes)
    chunks, _ = inside.plan_messages(kernel, matrices, everybody, 0, limit)
    if chunk_bytes is None:
        assert len(chunks) >= least
    else:
        assert limit == 2**28 // 4


@pytest.mark.parametrize("world, seed", [(world, seed) for world in (1, 2, 3, 4, 6, 8, 16) for seed in range(4)])
def test_no_part_is_larger_than_it_counts_in_a_chunk(kernel, world, seed):
    """And it counts as what it is, where no part has rows of several matrices; never as more than the whole."""
    for matrix in Model(kernel, world, seed).matrices:
        largest = max(matrix.part(rank).size for rank in matrix.holders)
        assert largest <= matrix.part_size <= matrix.rows * matrix.cols
        assert largest == matrix.part_size or len(matrix.shards.view.rows) > 1


@pytest.mark.parametrize(
    "shape, dim, side", [((8, 8), 0, 0), ((8, 8), 1, 1), ((4, 50, 6), 1, 0), ((4, 50, 6), 2, None), ((4, 6, 50), 2, 1)]
)
def test_matrices_are_cut_lengthwise_along_a_side_that_is_not_shorter(kernel, shape, dim, side):
    """Of a stack, whose experts ranks divide among them, too."""
    splits = [(0, 1), (dim, 1)] if len(shape) == 3 else [None, (dim, 1)]
    view = inside.matrix_view(kernel, shape, stacked=len(shape) == 3)
    assert inside.shards(kernel, view, inside.layout(kernel, shape, [2, 2], range(4), splits)).lengthwise(0) == side


@pytest.mark.parametrize("shape", [(8, 8), (50, 4), (4, 50)], ids=str)
def test_matrices_that_are_cut_along_both_sides_are_not_cut_lengthwise(kernel, shape):
    layout = inside.layout(kernel, shape, [2, 2], range(4), [(0, 1), (1, 1)])
    assert inside.shards(kernel, inside.matrix_view(kernel, shape), layout).lengthwise(0) is None


def test_a_rank_packs_at_most_the_limit_where_rows_do_not_divide_evenly(kernel):
    """Of 9 rows on 8 ranks the first has 2."""
    view = inside.matrix_view(kernel, (9, 512))
    shards = inside.shards(kernel, view, inside.layout(kernel, (9, 512), [8], range(8), [(0, 1)]))
    matrices = [inside.matrix(kernel, number, 0, shards, cost=1) for number in range(64)]
    limit = 32 * 1024
    chunks, _ = inside.plan_messages(kernel, matrices, tuple(range(8)), 0, limit)
    packed = [sum(part.matrix.part(0).size for part in chunk.holder.parts) for chunk in chunks]
    assert packed == [limit, limit]


def test_owners_are_holders_whatever_their_numbers(kernel):
    """Of each expert, on two of the four ranks, and of what all hold: a pipeline's stage may begin at any rank."""
    ranks = (3, 5, 6, 9)
    layout = inside.layout(kernel, (4, 8, 6), (2, 2), ranks, ((0, 1), (1, 1)))
    shards = inside.shards(kernel, inside.matrix_view(kernel, (4, 8, 6), stacked=True), layout)
    matrices = [inside.matrix(kernel, 0, index, shards, cost=9) for index in range(4)]
    on_all = inside.layout(kernel, (8, 6), (4,), ranks, ((0, 1),))
    shards = inside.shards(kernel, inside.matrix_view(kernel, (8, 6)), on_all)
    matrices += [inside.matrix(kernel, number, 0, shards) for number in range(1, 5)]
    for rank in ranks:
        (chunk,), _ = inside.plan_messages(kernel, matrices, ranks, rank, 10**6)
        assert all(each.owner in each.matrix.holders for each in chunk.assignments)
        assert sorted(each.owner for each in chunk.assignments) == sorted(2 * ranks)


@pytest.mark.parametrize("rows, cols", [(((0, 2), (4, 6)), ((0, 3),)), (((0, 2),), ((0, 1), (2, 3)))], ids=str)
def test_stochastic_rounding_of_a_part_in_several_blocks_is_refused(kernel, rows, cols):
    """Its noise follows from the row and the column at which one block begins."""
    part = kernel.plan.shards.Part
    with pytest.raises(ValueError, match=r"parts that are one block, and this rank has rows .* of up\.weight: shard"):
        part(rows, cols).origin("up.weight")
    assert part(((4, 6),), ((1, 3),)).origin("up.weight") == (4, 1)
