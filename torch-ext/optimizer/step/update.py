"""The update of all matrices in their order, and QK-clip of weights that no batch has scaled."""

from __future__ import annotations

from itertools import chain
from typing import Container, Mapping, Optional

from torch import Tensor

from ..parameters.state import REMAINDER, State, integers
from ..plan.layout import layout_of, local_part
from ..plan.process_groups import Ranks, group_of, this_rank
from ..plan.shards import local_rows
from ..rules.descent import scale_rows_
from ..rules.scaling import Scalings
from .batch import update_local_
from .finish import UpdateNorms
from .gram_sums import update_sum_
from .pipeline import advanced
from .recipe import StepContext
from .sharded import update_chunk_
from .workspace import Workspace


def update_matrices_(workspace: Workspace, context: StepContext, in_flight: int) -> list[UpdateNorms]:
    """Update shared matrices of which any rank has a gradient, and those of this process while messages fly, in place.

    Up to `in_flight` chunks have a message on its way while another is worked on. Returns norms as `update_local_`.
    """
    chunks = ([update_chunk_(work, context, group_of(ranks)) for work in works] for ranks, works in workspace.exchanges)
    sums = ([update_sum_(work, context, group_of(ranks)) for work in works] for ranks, works in workspace.sums)
    rounds = advanced(chain(chunks, sums), in_flight)
    results = next(rounds, [])  # the first parts are on their way
    norms = update_local_(workspace.chains, context)
    for ended in rounds:
        results += ended
    return norms + list(chain.from_iterable(results))


def scale_other_rows_(
    row_scales: Mapping[Tensor, Tensor],
    state: State,
    scaled: Container[Tensor],
    replica_ranks: Optional[Ranks],
    scalings: Scalings,
) -> None:
    """Apply QK-clip, in place, to what no batch has `scaled`.

    These are biases (each row has one element), frozen weights, and weights that the fallback updates.
    """
    for p, row_scale in row_scales.items():
        layout, local = layout_of("", p, replica_ranks), local_part(p)
        sharers = None if layout is None else layout.mesh.members
        if p not in scaled and sharers in scalings:
            rest = state[p].get(REMAINDER) if p in state else None
            remainder = None if rest is None else integers(local_part(rest))
            rows, found_inf = local_rows(row_scale, layout, this_rank()), scalings.on(sharers, local.device).found_inf
            scale_rows_(local, rows, remainder, [found_inf])
