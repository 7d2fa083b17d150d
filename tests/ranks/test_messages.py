"""What is really sent: the collectives of a step, counted, and what a rank holds while they fly."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.backends import on_every_backend
from tests.support.inside import chunks_of, muon_settings, plan_of
from tests.support.sharded_models import LAYOUTS, Case, Layout, Spec, muon, part_of, set_gradient_parts, train

SIZE = 32, 64
COUNT = 16

pytestmark = on_every_backend()


class Counted:
    """Counts the collectives that are called while it is entered: (name, elements to other ranks, bytes of one)."""

    NAMES = (
        "all_to_all_single", "all_to_all", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce",
        "barrier", "broadcast", "isend", "irecv", "send", "recv", "reduce_scatter_tensor", "gather", "scatter",
    )  # fmt: skip

    def __init__(self):
        self.calls: list[tuple[str, int, int]] = []

    def __enter__(self):
        self._real = {name: getattr(dist, name) for name in self.NAMES}
        for name in self.NAMES:
            setattr(dist, name, self._counting(name))
        return self

    def __exit__(self, *_):
        for name, function in self._real.items():
            setattr(dist, name, function)

    def _counting(self, name):
        def call(*arguments, **options):
            to_others = itemsize = 0
            if name == "all_to_all_single":
                _, sent, _, sizes = arguments
                to_others, itemsize = sum(sizes) - sizes[dist.get_rank(options["group"])], sent.element_size()
                assert sum(sizes) == sent.numel()
            self.calls.append((name, to_others, itemsize))
            return self._real[name](*arguments, **options)

        return call


def count_steps(kernel, case: Case):
    """Return the collectives of the last of the steps, and how many chunks the plan has.

    They come behind one by which each group of ranks agrees about settings.
    """
    counted = None
    step = kernel.Muon.step

    def counting(optimizer):
        nonlocal counted
        with Counted() as counted:
            step(optimizer)
        counted.chunks = len(chunks_of(optimizer))
        counted.groups = len(plan_of(optimizer).terms)

    kernel.Muon.step = counting
    try:
        train(kernel, case)
    finally:
        kernel.Muon.step = step
    agreements = counted.calls[: counted.groups]
    assert [called for called, *_ in agreements] == ["all_reduce"] * counted.groups
    return counted.calls[counted.groups :], counted.chunks


def case_on(layout: Layout, **settings) -> Case:
    specs = tuple(Spec(f"layers.{i}.up.weight", SIZE, layout) for i in range(COUNT))
    return Case(specs, {"ns_dtype": "float32", **settings}, steps=2)


@pytest.mark.parametrize("chunk_bytes", [1, 20_000, None])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "replicated"])
def test_step_sends_two_messages_per_chunk_of_formula_bytes(pools, name, chunk_bytes):
    """(S/R)(1 + 1/D - 2/(RD)) times the bytes of an element, for S elements on R parts in D copies, flags and padding.

    A part is a multiple of 16 bytes, and the flags of a message are padded to one.
    """
    layout = LAYOUTS[name]
    copies = math.prod(size for size, split in zip(layout.mesh, layout.splits) if split == "r")
    parts = 4 // copies
    results = pools(4).run(count_steps, case_on(layout, chunk_bytes=chunk_bytes))
    for calls, chunks in results:
        assert [called for called, *_ in calls] == ["all_to_all_single"] * (2 * chunks)
    # As many matrices as parts are in a chunk at least; 20,000 bytes are 2.4 of them on each rank, of `parts` parts.
    counts = {1: COUNT // parts, 20_000: -(-COUNT // max(20_000 * parts // (4 * 32 * 64), parts)), None: 1}
    assert {chunks for _, chunks in results} == {counts[chunk_bytes]}
    elements = COUNT * math.prod(SIZE) / parts * (1 + 1 / copies - 2 / (parts * copies))
    # A flag of each part that is sent, to the owner from its copy, and back to all, in a message to each other rank.
    flags = COUNT * (parts - 1 + 4 - 1)
    messages = 2 * 4 * 3 * counts[chunk_bytes]
    sent = sum(amount * itemsize for calls, _ in results for _, amount, itemsize in calls)
    assert 4 * (4 * elements + flags) <= sent < 4 * (4 * elements + flags) + 16 * messages


WHOLE = {
    "experts": Spec("layers.0.experts.w1", (8, 6, 5), Layout((4,), ("0",))),
    "copies of experts": Spec("layers.0.experts.w1", (8, 6, 5), Layout((2, 2), ("r", "0"))),
    "copies": Spec("up.weight", SIZE, LAYOUTS["replicated"]),
    # 12 rows on each rank, or 24 on each of two.
    "heads": Spec("wq.weight", (48, 20), LAYOUTS["rows"], {"split_rows": (6,) * 8}),
    "heads of copies": Spec("wq.weight", (48, 20), LAYOUTS["hsdp"], {"split_rows": (24, 6, 12, 6)}),
    "heads under tensor parallelism": Spec("wq.weight", (48, 20), LAYOUTS["strided rows"], {"split_rows": (6,) * 8}),
}


@pytest.mark.parametrize("spec", WHOLE.values(), ids=WHOLE)
def test_matrices_that_ranks_hold_whole_are_not_sent(pools, spec):
    """Experts, heads and small copies."""
    for calls, chunks in pools(4).run(count_steps, Case((spec,), {"expert_keys": ("experts",)}, steps=2)):
        assert (calls, chunks) == ([], 0)


def test_only_heads_that_ranks_cut_are_sent(pools):
    """With 12 rows on each rank three parts lie on one each, and the last of 28 rows on three."""
    spec = Spec("wq.weight", (48, 20), LAYOUTS["rows"], {"split_rows": (6, 6, 8, 28)})
    results = pools(4).run(count_steps, Case((spec,), {"ns_dtype": "float32"}, steps=2))
    assert all([called for called, *_ in calls] == ["all_to_all_single"] * 2 for calls, _ in results)
    # To the owner and back, with three flags, each in a message of its own; what the owner has itself is not sent.
    assert 28 * 20 < sum(amount for calls, _ in results for _, amount, _ in calls) <= 2 * (28 * 20 + 3 * 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_messages_have_the_dtype_of_the_products(pools, dtype):
    for calls, _ in pools(4).run(count_steps, case_on(LAYOUTS["rows"], ns_dtype=dtype)):
        assert {itemsize for _, _, itemsize in calls} == {getattr(torch, dtype).itemsize}


def explained_and_sent(kernel, case: Case):
    """Return what `explain()` says, and the bytes that a step sends to other ranks."""
    params = [(spec.name, part_of(case, i)) for i, spec in enumerate(case.specs)]
    optimizer = kernel.Muon(params, **muon_settings(kernel, case.settings))
    set_gradient_parts(case, [p for _, p in params], 1)
    with Counted() as counted:
        optimizer.step()
    return str(optimizer.explain()), sum(elements * itemsize for _, elements, itemsize in counted.calls)


@pytest.mark.parametrize("ns_dtype", ["float32", "float16"])
@pytest.mark.parametrize("chunk_bytes, chunks, under_way", [(2**24, "1 chunk", "1 chunk"), (1, "3 chunks", "2 chunks")])
def test_explain_says_what_is_sent_and_how_evenly_work_is_spread(pools, chunk_bytes, chunks, under_way, ns_dtype):
    """Of nine matrices, at least four in a chunk, one rank has three: 4/3 of the mean.

    Around float16, elements take four bytes to the owners and two back.
    """
    specs = tuple(Spec(f"layers.{i}.up.weight", (384, 400), LAYOUTS["rows"]) for i in range(9))
    settings = {"ns_dtype": ns_dtype, "ns_steps": 1, "chunk_bytes": chunk_bytes, "chunks_in_flight": 1}
    case = Case(specs, settings)
    for said, sent in pools(4).run(explained_and_sent, case):
        messages = 2 * int(chunks[0])
        assert f"{chunks} among 4 ranks, {messages} messages; this rank sends {sent / 2**20:.1f} MiB a step" in said
        assert f"with {under_way} under way" in said and "the largest load is 1.33 of the mean" in said


def test_explain_says_what_the_ranks_of_one_copy_send(pools):
    """Of one matrix in two copies, each of which does the work: two ranks exchange it, not numbered from 0 in one."""
    case = Case((Spec("layers.0.up.weight", (384, 400), LAYOUTS["hsdp"]),), {"ns_dtype": "float32", "ns_steps": 1})
    for said, sent in pools(4).run(explained_and_sent, case):
        assert f"1 chunk among 2 ranks, 2 messages; this rank sends {sent / 2**20:.1f} MiB a step" in said


def profiled(kernel, case: Case):
    """Return the name of a rank's work on each chunk in a profile, and how many matrices it owns there."""
    optimizer = muon(kernel, case, [part_of(case, i) for i in range(len(case.specs))])
    return [(chunk.profiled_as, len(chunk.messages.owner.matrices)) for chunk in chunks_of(optimizer)]


@pytest.mark.parametrize("method", ["standard", "gram_float32"])
def test_a_profile_names_the_flops_of_an_owner(pools, method):
    """Those of the standard iteration, 4 m² n + 2 m³ in each step, whichever does the work: rates follow from them."""
    (m, n), steps = SIZE, 5
    for chunks in pools(4).run(profiled, case_on(LAYOUTS["rows"], ns_method=method, ns_steps=steps, chunk_bytes=1)):
        for name, matrices in chunks:
            gflop = matrices * steps * (4 * m * m * n + 2 * m**3) / 1e9
            assert matrices and name == f"muon.orthogonalize {gflop:.6g} GFLOP"


def elements_in_flight(kernel, case: Case):
    """Return, for each chunk, elements of directions, of what comes for them, of what goes back, and of updates."""
    params = [(spec.name, part_of(case, i)) for i, spec in enumerate(case.specs)]
    optimizer = kernel.Muon(params, **muon_settings(kernel, case.settings))
    sides = [(chunk.messages.holder, chunk.messages.owner) for chunk in chunks_of(optimizer)]
    return [
        (sum(holder.sent) + holder.scratch, sum(owner.received), sum(owner.sent), sum(holder.received))
        for holder, owner in sides
    ]


@pytest.mark.parametrize("chunk_bytes", [1, 40_000])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "replicated"])
def test_chunk_holds_at_most_chunk_bytes_or_one_matrix(pools, name, chunk_bytes):
    """Of each kind: what is gathered and what goes back, here and at the owner."""
    layout, matrix = LAYOUTS[name], math.prod(SIZE)
    copies = math.prod(size for size, split in zip(layout.mesh, layout.splits) if split == "r")
    # And a flag for each matrix, each way, padded to 16 bytes in a message to each rank, at most.
    limit = max(chunk_bytes / 4, matrix) + COUNT + 4 * 3
    for chunks in pools(4).run(elements_in_flight, case_on(layout, chunk_bytes=chunk_bytes)):
        for directions, gathered, returned, updates in chunks:
            assert directions <= limit
            assert updates <= limit
            # An owner has whole matrices: up to one more than its share. It sends them to all copies.
            assert gathered <= limit / copies + matrix
            assert returned <= limit + copies * matrix


def order_of_step(kernel, case: Case):
    """Return what a step does, in order: messages that are started, and batches that this rank works on alone."""
    params = [part_of(case, i) for i in range(len(case.specs))]
    optimizer = muon(kernel, case, params)
    set_gradient_parts(case, params, 1)
    order, send, update = [], dist.all_to_all_single, kernel.step.batch.update_chain_

    def recorded(name, function):
        def call(*arguments, **options):
            order.append(name)
            return function(*arguments, **options)

        return call

    sending = mock.patch.object(dist, "all_to_all_single", recorded("message", send))
    with sending, mock.patch.object(kernel.step.batch, "update_chain_", recorded("batch", update)):
        optimizer.step()
    return order, len(plan_of(optimizer).batches), len(chunks_of(optimizer))


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("chunk_bytes", [1, None])
def test_local_work_follows_the_first_gather(pools, in_flight, chunk_bytes):
    """It comes before everything that follows."""
    specs = (WHOLE["experts"], WHOLE["copies"], *case_on(LAYOUTS["rows"]).specs)
    settings = {"expert_keys": ("experts",), "chunk_bytes": chunk_bytes, "chunks_in_flight": in_flight}
    for order, batches, chunks in pools(4).run(order_of_step, Case(specs, settings)):
        assert batches > 1 and chunks == (1 if chunk_bytes is None else 4)
        assert order == ["message"] + ["batch"] * batches + ["message"] * (2 * chunks - 1)
