"""What a step on shards holds beyond parameters, gradients and state: a formula, and allocations that are counted.

Others may use memory again that a step has let go.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
import weakref
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.allocations import Allocations
from tests.support.backends import on_every_backend
from tests.support.inside import chunks_of, plan_of
from tests.support.pairwise import in_turn
from tests.support.pieces import put_together
from tests.support.rank_pool import device_of_ranks
from tests.support.sharded_models import (
    LAYOUTS,
    Case,
    Spec,
    assert_same,
    muon,
    part_of,
    set_gradient_parts,
    train,
    train_alone,
)

SHAPES = ((96, 160), (160, 96), (120, 120), (64, 200)) * 3
# Flags, out and back, and norms: fewer than eight numbers of eight bytes for each matrix.
SMALL = 64 * len(SHAPES)
# A thread of gloo may hold a message for a moment after it has come, which only adds: the least of all steps counts.
STEPS = 5
CUT = "rows", "hsdp", "rows and columns"


def case_on(name: str, **settings) -> Case:
    specs = tuple(Spec(f"layers.{i}.up.weight", shape, LAYOUTS[name]) for i, shape in enumerate(SHAPES))
    return Case(specs, settings)


class Held(NamedTuple):
    """Bytes of a chunk in each phase, and at most; bytes that a batch keeps, that the work on one adds, and of both."""

    gathered: int
    owned: int
    scattered: int
    most: int
    batch: int
    work: int
    together: int


def held_by(chunk) -> Held:
    holder, owner = chunk.messages.holder, chunk.messages.owner
    parameter = chunk.first.parameter
    packed, work = parameter.packed_dtype.itemsize, parameter.work_dtype.itemsize
    sizes = [batch_bytes(owned.batch, packed, work) for chain in chunk.chains for owned in chain] or [(0, 0, 0)]
    return Held(
        (sum(holder.sent) + holder.scratch + sum(owner.received)) * packed,
        sum(owner.received) * packed + sum(owner.sent) * work,
        (sum(owner.sent) + sum(holder.received)) * work,
        chunk.messages.buffer_bytes(packed, work),
        *map(max, zip(*sizes)),
    )


def batch_bytes(batch, packed: int, work: int) -> tuple[int, int, int]:
    """What a batch keeps on a CPU, the most that `polar_factors` takes beside it, and what both surely hold at once."""
    m, n = sorted(batch.packed_shape)
    kept, copies = len(batch.matrices) * m * n * (packed + work) + 2 * m * m * work, 2 * m * n * work
    return kept, max(copies, m * n * (4 + work)), kept + copies


def trained(kernel, case: Case):
    """Return an optimizer, its parameters, and the most that one of its steps held at a time."""
    params = [part_of(case, i) for i in range(len(case.specs))]
    optimizer = muon(kernel, case, params)
    peaks = []
    for step in range(1, STEPS + 1):
        set_gradient_parts(case, params, step)
        optimizer._graphs = kernel.step.graphs.UpdateGraphs()  # what it keeps for batches is counted anew
        with Allocations() as counted:
            optimizer.step()
        peaks.append(counted.peak)
    return optimizer, params, min(peaks)


def counted_step(kernel, case: Case):
    """Return the most that a step held at a time, the formula for it, and what was surely held together.

    Products are torch's, of which memory for one matrix is held; compiled ones hold less.
    """
    with mock.patch.object(kernel.kernels.native_products, "is_faster", lambda _: False):
        optimizer, params, peak = trained(kernel, case)
    assert len(plan_of(optimizer).exchanges) == 1
    chunks = [held_by(chunk) for chunk in chunks_of(optimizer)]
    assert all(chunk.most == max(chunk.gathered, chunk.owned, chunk.scattered) for chunk in chunks)
    in_flight = case.settings["chunks_in_flight"]
    (exchange,) = plan_of(optimizer).exchanges
    assert f"holds up to {exchange.held_bytes() / 2**20:.1f} MiB" in str(optimizer.explain())
    state = sum(tensor.to_local().nbytes for p in params for tensor in optimizer.state[p].values())
    assert f"this rank holds {kernel.explain.writing.bytes_text(state)} of the state" in optimizer.explain().notes
    assert exchange.held_bytes() == formula(chunks, in_flight)
    return peak, formula(chunks, in_flight), surely_together(kernel, chunks, in_flight)


def formula(chunks: list[Held], in_flight: int) -> int:
    """The buffers of as many chunks in a row as are under way together, the largest batch, and the work on one."""
    windows = [chunks[i : i + in_flight + 1] for i in range(len(chunks))]
    largest = max(chunk.batch for chunk in chunks) + max(chunk.work for chunk in chunks)
    return max(sum(chunk.most for chunk in window) for window in windows) + largest


def surely_together(kernel, chunks: list[Held], in_flight: int) -> int:
    """The most that chunks hold together which take turns as those of a step do."""
    held, totals = [0] * len(chunks), []

    def turns(i: int, chunk: Held):
        held[i] = chunk.gathered
        yield
        held[i] = chunk.owned + chunk.together
        totals.append(sum(held))
        held[i] = chunk.scattered
        yield
        held[i] = 0

    for _ in kernel.step.pipeline.advanced([[turns(i, chunk) for i, chunk in enumerate(chunks)]], in_flight):
        pass
    return max(totals)


@pytest.mark.parametrize("pair, in_flight", in_turn(itertools.product(CUT, [1, 80_000, None]), [1, 2]))
def test_step_holds_the_chunks_under_way_and_one_batch(pools, pair, in_flight):
    """Where all ranks have all gradients; one without holds zeros in their place, and copies of its momentum."""
    name, chunk_bytes = pair
    case = case_on(name, ns_dtype="float32", chunk_bytes=chunk_bytes, chunks_in_flight=in_flight)
    for peak, most, least in pools(4).run(counted_step, case):
        assert least <= peak <= most + SMALL


def step_by_default(kernel, case: Case):
    """Return the most that a step held at a time with the products of this processor, and what `explain()` says."""
    optimizer, _, peak = trained(kernel, case)
    return peak, plan_of(optimizer).exchanges[0].held_bytes()


@pytest.mark.parametrize("chunk_bytes", [80_000, None])
def test_a_step_holds_no_more_than_it_says(pools, chunk_bytes):
    case = case_on("rows", ns_dtype="float32", chunk_bytes=chunk_bytes, chunks_in_flight=2)
    assert all(peak <= said + SMALL for peak, said in pools(4).run(step_by_default, case))


@pytest.mark.parametrize("name", ["rows", "hsdp"])
def test_memory_formula_holds_for_smaller_returned_messages(pools, name):
    """Messages come back in the dtype of the products, here float16."""
    case = case_on(name, ns_dtype="float16", ns_method="standard", chunk_bytes=80_000, chunks_in_flight=2)
    for peak, most, least in pools(4).run(counted_step, case):
        assert least <= peak <= most + SMALL


def gradients_alive(kernel, case: Case):
    """Return, for each gather, parameters whose gradients are in memory as it starts, and those that are needed later.

    Then all whose part here is not empty.
    """
    params = [part_of(case, i) for i in range(len(case.specs))]
    optimizer = muon(kernel, case, params)
    set_gradient_parts(case, params, 1)
    memory = {i: weakref.ref(p.grad.to_local().untyped_storage()) for i, p in enumerate(params) if p.to_local().numel()}
    real, transfers = kernel.step.sharded._exchanged, []

    def exchanged(chunk, *arguments):
        transfers.append((chunk, {i for i, storage in memory.items() if storage() is not None}))
        return real(chunk, *arguments)

    with mock.patch.object(kernel.step.sharded, "_exchanged", exchanged):
        optimizer.step()
    chunks, rank = chunks_of(optimizer), dist.get_rank()
    # The first transfer of each chunk is its gather.
    gathers = [next(alive for exchanged, alive in transfers if exchanged is chunk) for chunk in chunks]
    later = [
        [part.matrix for chunk in chunks[i + 1 :] for part in chunk.messages.holder.parts] for i in range(len(chunks))
    ]
    local = [matrix for batch in plan_of(optimizer).batches for matrix in batch.matrices]
    later[0] += [matrix for matrix in local if matrix.part(rank).size]
    needed = [{int(matrix.parameter.name.split(".")[0]) for matrix in matrices} for matrices in later]
    assert len(gathers) == len(chunks) > 2
    return gathers, needed, set(memory)


def case_of_several_matrices(name: str, release: bool) -> Case:
    """Parameters of one matrix and of several, which go in different chunks."""
    several = {"split_rows": (8, 40, 16)}
    shapes = [(24, 20), (64, 12), (30, 30), (64, 16), (18, 40), (64, 30), (12, 12), (10, 10), (14, 9)]
    specs = [Spec(f"{i}.up.weight", s, LAYOUTS[name], several if s[0] == 64 else {}) for i, s in enumerate(shapes)]
    return Case(tuple(specs), {"chunk_bytes": 1, "release_grads": release})


@on_every_backend()
@pytest.mark.parametrize("name", ["rows", "columns", "hsdp", "rows and columns"])
def test_released_gradients_of_shards_are_freed_once_packed(pools, name):
    """As soon as the last matrix of their parameter is packed."""
    for gathers, needed, _ in pools(4).run(gradients_alive, case_of_several_matrices(name, release=True)):
        assert gathers == needed


@on_every_backend()
def test_unreleased_gradients_stay(pools):
    for gathers, _, numbers in pools(4).run(gradients_alive, case_of_several_matrices("rows", release=False)):
        assert all(alive == numbers for alive in gathers)


def train_amid_churn(kernel, case: Case):
    """Train while another thread takes memory, fills it with NaN and gives it back, and ranks are late at random."""
    done = threading.Event()
    draw = random.Random(dist.get_rank())
    # A thread has a current device of its own.
    device = torch.empty(0, device=device_of_ranks()).device

    def churn():
        while not done.is_set():
            [torch.empty(draw.randint(1, 5000), device=device).fill_(float("nan")) for _ in range(20)]
            time.sleep(draw.choice([0.0, 0.0, 0.001]))

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        return train(kernel, case)
    finally:
        done.set()
        thread.join()


@pytest.mark.slow
@on_every_backend()
@pytest.mark.parametrize("in_flight", [1, 2, 3, 5])  # 500 steps each, 2,000 in all
def test_memory_churn_corrupts_no_message(kernel, pools, in_flight):
    layouts = ["rows", "hsdp", "columns and rows", "rows", "strided rows", "columns"] * 2
    specs = tuple(Spec(f"layers.{i}.up.weight", (9 + i, 14), LAYOUTS[name]) for i, name in enumerate(layouts))
    case = Case(specs, {"chunk_bytes": 1, "chunks_in_flight": in_flight, "lr": 1e-3}, steps=500)
    results = put_together(pools(4).run(train_amid_churn, case, seconds=400))
    alone = train_alone(kernel, case, results[0].holders, pools.device)
    for result in results:
        assert_same(case, result, alone)
