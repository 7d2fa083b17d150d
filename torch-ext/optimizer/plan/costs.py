"""What work costs: the FLOPs of an owner, and the best number of chunks, by a model of links and GPUs.

The rates are those of one GPU of 2024 with a 400 Gbit/s link. They are the same on every rank, so that all ranks make
the same plan. `python -m tools.scale.report` shows what follows from them, `python -m tools.scale.calibrate` measures
them from a trace.
"""

from __future__ import annotations

import math

from ..iteration import iteration_costs
from ..kernels.products import SINGLE

FLOPS_PER_SECOND = 4e14  # of products in half precision
BYTES_PER_SECOND = 5e10  # that a rank sends over the network
NODE_BYTES_PER_SECOND = 4e11  # that a rank sends to others of its node
SECONDS_PER_PEER = 1e-6  # latency of a collective for each other rank, however little is sent

# The FLOPs that a GPU does while one element of two bytes is sent. Counting them keeps long thin matrices, which cost
# few FLOPs but many bytes, from all going to one rank.
FLOPS_OF_AN_ELEMENT = int(2 * FLOPS_PER_SECOND / BYTES_PER_SECOND)

# A matrix with several copies is orthogonalized once and sent if one step of its iteration costs more FLOPs than this;
# else each rank repeats it. A guess, not measured.
WORTH_SENDING = 2**28


def standard_step_flops(rows: int, cols: int) -> int:
    """Return the FLOPs of one step of the standard iteration, 4 m² n + 2 m³, without the savings of symmetry."""
    return int(iteration_costs(*sorted((rows, cols)), 1, 1, SINGLE)[0])


def owners_cost(rows: int, cols: int, steps: int) -> int:
    """Return the cost of a matrix to its owner in FLOPs: `steps` steps, and sending each element once."""
    return steps * standard_step_flops(rows, cols) + FLOPS_OF_AN_ELEMENT * rows * cols


def sum_cost(
    size: tuple[int, int], steps: int, windows: int, members: int, bytes_per_second: float = BYTES_PER_SECOND
) -> float:
    """Return the cost of a wide m x n matrix, in FLOPs, to each of the `members` ranks that sum its Gram matrices.

    Each member does its share of the products with the long side and all of the m x m products. Gram matrices are
    summed in float32; in a ring each rank sends them twice. Products count as saving nothing, as for owners: all ranks
    must decide alike, whatever they measured.
    """
    m, n = size
    _, products = iteration_costs(m, n / members, steps, windows, SINGLE)
    return products + windows * 2 * 4 * m * m * FLOPS_PER_SECOND / bytes_per_second


def team_cost(size: tuple[int, int], steps: int, windows: int, members: int) -> int:
    """Return the cost of a wide m x n matrix, in FLOPs, to each of the `members` ranks of a team: they are on one node.

    They sum its Gram matrices. Before and after that its columns go to the members and back, two bytes an element.
    """
    m, n = size
    columns = 2 * 2 * m * n * FLOPS_PER_SECOND / NODE_BYTES_PER_SECOND
    return int(sum_cost(size, steps, windows, members, NODE_BYTES_PER_SECOND) + columns + FLOPS_OF_AN_ELEMENT * m * n)


def useful_copies(work: float, largest: float, elements: int, ranks: int, copies: int) -> tuple[int, float]:
    """Return how many of the `copies` of some matrices should share their `work`, and what a step then costs, in FLOPs.

    A copy is on `ranks` ranks, so c copies are on c times as many. A step takes at least the work divided by these,
    and at least the `largest` work of one rank, whose owner sends its `elements` to all c copies. c divides `copies`.
    """

    def cost(count: int) -> float:
        return max(work / (count * ranks), largest) + count * elements * FLOPS_OF_AN_ELEMENT

    best = min((count for count in range(1, copies + 1) if copies % count == 0), key=cost)
    return best, cost(best)


def useful_chunks(sent_bytes: float, work_flops: float, ranks: int) -> int:
    """Return the best number of chunks for an exchange in which a rank sends `sent_bytes` and computes `work_flops`.

    With W seconds of products and S seconds on the wire, K chunks take about max(W, S) + min(W, S) / K + K c: the
    shorter of the two is hidden except for one chunk's share, and each chunk costs c, the latency of its two messages.
    The minimum is at K = sqrt(min(W, S) / c).
    """
    shorter = min(work_flops / FLOPS_PER_SECOND, sent_bytes / BYTES_PER_SECOND)
    latency = 2 * SECONDS_PER_PEER * max(ranks - 1, 1)
    return max(1, round(math.sqrt(shorter / latency)))
