"""What work costs: FLOPs of an owner, and how many chunks a step is cut into, by a model of links and GPUs.

The rates are those of one GPU of 2024 with a 400 Gbit/s link, and the same on every rank, so that all plan alike.
`python -m tools.scale.report` shows what follows from them, `python -m tools.scale.calibrate` measures them in a trace.
"""

from __future__ import annotations

import math

from ..iteration import iteration_costs
from ..kernels.products import SINGLE

FLOPS_PER_SECOND = 4e14  # of products in half precision
BYTES_PER_SECOND = 5e10  # that a rank sends
NODE_BYTES_PER_SECOND = 4e11  # that a rank sends to others of its node
SECONDS_PER_PEER = 1e-6  # that a collective takes for each other rank, whatever is sent

# FLOPs in whose time an element of two bytes goes over the wire. It keeps long thin matrices, which cost few FLOPs,
# from meeting on one rank.
FLOPS_OF_AN_ELEMENT = int(2 * FLOPS_PER_SECOND / BYTES_PER_SECOND)

# Copies of a matrix are orthogonalized once, and sent, where a step costs more FLOPs; a guess, not measured.
WORTH_SENDING = 2**28


def flops(rows: int, cols: int) -> int:
    """Return the FLOPs of one step of the standard iteration, 4 m² n + 2 m³, by products that save nothing."""
    return int(iteration_costs(*sorted((rows, cols)), 1, 1, SINGLE)[0])


def owners_cost(rows: int, cols: int, steps: int) -> int:
    """Return what a matrix costs its owner, in FLOPs: so many steps, and the way there and back."""
    return steps * flops(rows, cols) + FLOPS_OF_AN_ELEMENT * rows * cols


def team_cost(size: tuple[int, int], steps: int, windows: int, members: int) -> int:
    """Return what a wide m x n matrix costs each of the ranks that work on it together, in FLOPs.

    Each makes its share of the products with the long side and all of m x m. In a node the columns go to the members
    and back, two bytes an element, and Gram matrices are summed in float32, for which a ring sends each twice.
    """
    m, n = size
    _, products = iteration_costs(m, n / members, steps, windows, SINGLE)
    sent = 2 * 2 * m * n + windows * 2 * 4 * m * m
    return int(products + sent * FLOPS_PER_SECOND / NODE_BYTES_PER_SECOND + FLOPS_OF_AN_ELEMENT * m * n)


def useful_copies(work: float, largest: float, elements: int, parts: int, copies: int) -> tuple[int, float]:
    """Return how many of the `copies` of some matrices best share their `work`, and what a step then costs, in FLOPs.

    Each copy lies in `parts`. A step takes c copies no less than the work of one of their c * parts ranks, nor than the
    `largest` work of one rank, and that matrix's owner sends its `elements` to all c. c divides the number of copies.
    """

    def cost(count: int) -> float:
        return max(work / (count * parts), largest) + count * elements * FLOPS_OF_AN_ELEMENT

    best = min((count for count in range(1, copies + 1) if copies % count == 0), key=cost)
    return best, cost(best)


def useful_chunks(sent_bytes: float, work_flops: float, ranks: int) -> int:
    """Return into how many chunks an exchange is best cut, of which a rank sends and works on so much.

    With W seconds of products and S seconds on the wire, K chunks take about max(W, S) + min(W, S) / K + K c: the
    shorter of the two is hidden, all but one chunk's share, and each chunk costs c, the latency of its two messages.
    The least of that is at K = sqrt(min(W, S) / c).
    """
    shorter = min(work_flops / FLOPS_PER_SECOND, sent_bytes / BYTES_PER_SECOND)
    latency = 2 * SECONDS_PER_PEER * max(ranks - 1, 1)
    return max(1, round(math.sqrt(shorter / latency)))
