"""Which ranks work together in an exchange, in batches of which size, and what a rank holds at a time."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from tests.support import inside

BUFFERS = 1000


def exchange_of(kernel, device: str, chains, teams):
    """Return an exchange of one chunk; `chains` have bytes of memory and work of each batch, `teams` bytes of work."""
    parameter = SimpleNamespace(device=torch.device(device), packed_dtype=torch.float32, update_dtype=torch.float32)
    batches = [[SimpleNamespace(memory_bytes=memory, work_bytes=work) for memory, work in chain] for chain in chains]
    chunk = SimpleNamespace(
        messages=SimpleNamespace(buffer_bytes=lambda *_: BUFFERS),
        first=SimpleNamespace(parameter=parameter),
        chains=[[SimpleNamespace(batch=batch) for batch in chain] for chain in batches],
        teams=[(SimpleNamespace(work_bytes=work), None) for work in teams],
    )
    return kernel.plan.exchanges.Exchange((0, 1), 0, (chunk,), (1, 1), in_flight=1)


OWNED = {
    "nothing": ([], [], 0, 0),
    "two chains": ([[(100, 1)], [(10, 50)]], [], 100 + 50, 100 + 1),
    "a chain of two batches": ([[(60, 5), (60, 5)], [(100, 20)]], [], 2 * 60 + 20, 2 * (60 + 5)),
    "a part of a team": ([], [70], 70, 70),
    "a team beside a chain": ([[(100, 1)]], [70], 100 + 70, 100 + 1),
}


@pytest.mark.parametrize("owned", OWNED)
def test_a_cpu_keeps_memory_from_batch_to_batch_and_a_gpu_does_not(kernel, owned):
    """So it holds the most that is kept and the most that work adds, and a GPU what one chain takes in all."""
    chains, teams, *held = OWNED[owned]
    memory = [exchange_of(kernel, device, chains, teams).held_bytes() - BUFFERS for device in ("cpu", "cuda")]
    assert memory == held


@pytest.mark.parametrize("splits", [(None, (0, 1)), ((0, 1), None), (None, (1, 1))], ids=str)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_replicas_that_work_together_have_what_they_had(kernel, count, splits):
    """Also on a mesh whose ranks are in another order, and all of them agree on who they are."""
    ranks = (5, 2, 7, 0, 3, 6, 1, 4)
    whole = inside.layout(kernel, (8, 6), (4, 2) if splits[0] is None else (2, 4), ranks, splits)
    for rank in ranks:
        layout = kernel.plan.exchanges.replica_subset(whole, count, rank)
        assert layout.copies == count and rank in layout.mesh
        for member in layout.mesh.members:
            assert kernel.plan.exchanges.replica_subset(whole, count, member) == layout
            assert kernel.plan.layout.runs_of(layout, member) == kernel.plan.layout.runs_of(whole, member)


CHAINS = {None: [[2, 2]], 5000: [[2, 2]], 4000: [[2], [2]], 1: [[1]] * 4}  # matrices of batches, by `chunk_bytes`


@pytest.mark.parametrize("chunk_bytes", CHAINS)
def test_an_owner_packs_at_most_chunk_bytes_at_a_time(kernel, chunk_bytes):
    """In a batch, and in a chain of batches that share products; or one matrix, which has 1,200 bytes here."""
    products, matrices = kernel.kernels.products.BATCHED, []
    iteration = kernel.iteration.Iteration("gram", (), 1.0, torch.float32, torch.float32, products)
    for number, shape in enumerate([(12, 25)] * 4 + [(25, 12)] * 4):
        layout = inside.layout(kernel, shape, [2], range(2), [(0, 1)])
        shards = inside.shards(kernel, inside.matrix_view(kernel, shape), layout)
        matrix = dataclasses.replace(inside.matrix(kernel, number, 0, shards), iteration=iteration)
        vars(matrix.parameter).update(device=torch.device("cuda"), family="one", offloaded=False)
        matrices.append(matrix)
    (messages,), _ = inside.plan_messages(kernel, matrices, (0, 1), 0, 10**6)
    chunk = kernel.plan.exchanges._chunk(messages, 0, chunk_bytes)
    assert [[len(owned.positions) for owned in chain] for chain in chunk.chains] == CHAINS[chunk_bytes]
