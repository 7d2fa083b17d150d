"""The model of what work and messages cost, by which ranks share matrices."""

from __future__ import annotations

import math

import pytest

SIZE, STEPS, WINDOWS = (512, 4096), 5, 2


def test_a_step_costs_what_its_products_do_whichever_side_is_long(kernel):
    flops, owners_cost = kernel.plan.costs.standard_step_flops, kernel.plan.costs.owners_cost
    m, n = SIZE
    assert flops(m, n) == flops(n, m) == 4 * m * m * n + 2 * m**3
    assert owners_cost(m, n, STEPS) == owners_cost(n, m, STEPS)
    assert owners_cost(m, n, STEPS) - owners_cost(m, n, STEPS - 1) == flops(m, n)
    assert owners_cost(m, n, 0) == m * n * kernel.plan.costs.FLOPS_OF_AN_ELEMENT


@pytest.mark.parametrize("members", [2, 8])
def test_members_share_the_long_side_and_sum_gram_matrices_in_float32(kernel, members):
    """In a ring each rank sends them twice."""
    costs, (m, n) = kernel.plan.costs, SIZE
    products = costs.sum_cost(SIZE, STEPS, WINDOWS, members, math.inf)
    assert products == costs.sum_cost((m, n // members), STEPS, WINDOWS, 1, math.inf)
    sums = costs.sum_cost(SIZE, STEPS, WINDOWS, members) - products
    assert sums == pytest.approx(WINDOWS * 2 * 4 * m * m * costs.FLOPS_PER_SECOND / costs.BYTES_PER_SECOND)


def test_a_team_sends_columns_inside_of_a_node_and_the_matrix_once(kernel):
    """To the members and back, two bytes an element."""
    costs, (m, n) = kernel.plan.costs, SIZE
    sums = costs.sum_cost(SIZE, STEPS, WINDOWS, 8, costs.NODE_BYTES_PER_SECOND)
    columns = 4 * m * n * costs.FLOPS_PER_SECOND / costs.NODE_BYTES_PER_SECOND
    sent = m * n * costs.FLOPS_OF_AN_ELEMENT
    assert costs.team_cost(SIZE, STEPS, WINDOWS, 8) == pytest.approx(sums + columns + sent, abs=1)


@pytest.mark.parametrize("largest, elements", [(0, 10), (0, 10**6), (0, 10**7), (10**12, 10**6), (10**13, 10)])
def test_as_many_copies_share_work_as_take_the_least_time_and_divide_all(kernel, largest, elements):
    def cost(count):
        return max(1e13 / (count * 4), largest) + count * elements * kernel.plan.costs.FLOPS_OF_AN_ELEMENT

    best = min((1, 2, 3, 6), key=cost)
    assert kernel.plan.costs.useful_copies(1e13, largest, elements, 4, 6) == (best, cost(best))


def test_there_is_one_chunk_at_least_and_a_rank_alone_has_the_latency_of_two(kernel):
    useful = kernel.plan.costs.useful_chunks
    assert useful(0, 1e15, 8) == useful(1e9, 0, 8) == 1
    assert useful(1e9, 1e15, 1) == useful(1e9, 1e15, 2) > useful(1e9, 1e15, 3) > 1


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_as_many_chunks_as_hide_most_of_the_shorter_work_for_the_latency_of_two_messages_each(kernel, ranks):
    """max(W, S) + min(W, S) / K + K c is least at K = sqrt(min(W, S) / c); the nearest whole number is taken."""
    costs = kernel.plan.costs
    shorter, latency = 1e9 / costs.BYTES_PER_SECOND, 2 * costs.SECONDS_PER_PEER * (ranks - 1)
    chunks = costs.useful_chunks(1e9, 1e15, ranks)
    assert abs(chunks - math.sqrt(shorter / latency)) <= 0.5
