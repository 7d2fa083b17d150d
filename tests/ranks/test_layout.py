"""How tensors lie on ranks, and what ranks that share them must agree about. The other ranks do not exist."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture(params=[0, 3])
def rank(request):
    dist.init_process_group("fake", rank=request.param, world_size=4, store=FakeStore())
    yield request.param
    if dist.is_initialized():
        dist.destroy_process_group()


def on(mesh, placements, local, shape=None):
    """A DTensor with this local part, and of this shape on all ranks of a mesh."""
    shape = shape or local.shape
    order = sorted(range(local.ndim), key=local.stride, reverse=True)
    strides = torch.empty_permuted(shape, order, device="meta").stride()
    mesh = mesh if isinstance(mesh, DeviceMesh) else DeviceMesh("cpu", mesh)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)


CHANGES = {
    "dtype": lambda x: x.bfloat16(),
    "device": lambda x: x.to("meta"),
    "shape": lambda x: x[:2],
    "strides": lambda x: x.mT.contiguous().mT,
    "class": nn.Parameter,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layout_describes_no_tensor_that_lies_otherwise(kernel, change):
    first, x = torch.ones(2), torch.ones(4, 6)
    laid_out = kernel.plan.layout.laid_out([first, x])
    assert laid_out.describes([first.clone(), x.clone()]) and not laid_out.describes([first, CHANGES[change](x)])


def test_tensors_lie_alike_with_the_same_parts_of_the_same_meshes(kernel, rank):
    shard, all_ranks = torch.ones(2, 6), [0, 1, 2, 3]
    lie_alike, a = kernel.plan.layout.lie_alike, on(all_ranks, [Shard(0)], shard, (8, 6))
    assert lie_alike(a, on(all_ranks, [Shard(0)], shard.clone(), (8, 6))) and lie_alike(shard, torch.ones(3))
    others = shard, on(all_ranks, [Replicate()], shard), on([0, 1, 3, 2], [Shard(0)], shard, (8, 6))
    assert not any(lie_alike(a, other) for other in (*others, on(all_ranks, [Shard(0)], torch.ones(3, 6), (12, 6))))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_beside_a_parameter_is_on_its_device_in_its_order(kernel, rank, device):
    local = torch.ones(2, 4, 3, 3, device=device).to(memory_format=torch.channels_last)
    p = on([0, 1, 2, 3], [Shard(0)], local, (8, 4, 3, 3))
    beside = kernel.plan.layout.memory_beside(p, p.shape, torch.bfloat16)
    assert (beside.stride(), beside.dtype, beside.placements) == (p.stride(), torch.bfloat16, p.placements)
    assert beside.to_local().stride() == local.stride() and beside.to_local().device == local.device


def test_groups_of_a_mesh_are_those_of_all_its_dimensions_while_there_is_a_world(kernel, rank):
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    p, elsewhere = on(mesh, [Replicate(), Shard(0)], torch.ones(2, 6), (4, 6)), torch.ones(2)
    groups_of = kernel.plan.layout.groups_of
    assert groups_of([elsewhere, p, p]) == [mesh.get_group(0), mesh.get_group(1)]
    dist.destroy_process_group()
    assert groups_of([p]) == []


def test_a_subclass_of_dtensor_is_a_shard(kernel):
    class Special(DTensor):
        pass

    assert kernel.plan.layout.has_shards([torch.Tensor, Special]) and not kernel.plan.layout.has_shards([nn.Parameter])


def terms_of(kernel, named, **settings):
    groups = kernel.Muon([(name, nn.Parameter(p)) for name, p in named.items()], **settings).param_groups
    state = {p: {} for group in groups for p in group["params"]}
    return kernel.plan.terms.terms_of(groups, "", range(len(groups)), {}, None, state)


def digest_of(kernel, p, **settings):
    ((_, terms),) = terms_of(kernel, {"up.weight": p}, **settings).items()
    return terms.digest


def test_ranks_that_have_a_parameter_otherwise_have_other_terms(kernel, rank):
    all_ranks, pairs, rows, columns = [0, 1, 2, 3], [[0, 1], [2, 3]], torch.ones(2, 8), torch.ones(8, 2)
    ways = [
        on(all_ranks, [Shard(0)], rows, (8, 8)),
        on(all_ranks, [Shard(0)], rows.bfloat16(), (8, 8)),
        on(all_ranks, [Shard(0)], columns.mT, (8, 8)),
        on(all_ranks, [Shard(0)], torch.ones(2, 6), (8, 6)),
        on(all_ranks, [Shard(1)], columns, (8, 8)),
        on([3, 1, 2, 0], [Shard(0)], rows, (8, 8)),
        on(DeviceMesh("cpu", pairs, mesh_dim_names=("a", f"b{rank}")), [Shard(0), Shard(0)], rows, (8, 8)),
    ]
    assert len({digest_of(kernel, p) for p in ways}) == len(ways)


@pytest.mark.parametrize(
    "shape, dtype, same", [((8, 8), None, False), ((8, 8), torch.bfloat16, True), ((8,), None, True)]
)
def test_ranks_that_choose_another_dtype_by_their_processors_have_other_terms(
    kernel, rank, monkeypatch, shape, dtype, same
):
    """For matrices: nothing else is multiplied."""
    digests = set()
    for fast in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(kernel.plan.terms, "default_work_dtype", lambda p, fast=fast: fast)
        digests.add(digest_of(kernel, on([0, 1, 2, 3], [Shard(0)], torch.ones(2, *shape[1:]), shape), ns_dtype=dtype))
    assert (len(digests) == 1) == same


def test_functions_are_the_same_if_they_give_the_same_to_the_parameters_of_muon(kernel, rank):
    def terms(factor):
        all_ranks = [0, 1, 2, 3]
        named = {
            "up.weight": on(all_ranks, [Shard(0)], torch.ones(2, 8), (8, 8)),
            "up.bias": on(all_ranks, [Shard(0)], torch.ones(1), (4,)),
        }
        (terms,) = terms_of(kernel, named, adjust_lr_fn=lambda rows, cols: factor * rows).values()
        return terms

    one, same, other = terms(1.0), terms(1.0), terms(2.0)
    assert one.digest == same.digest != other.digest
    assert [a == b for a, b in zip(one.lines, other.lines)] == [name == "up.bias" for name in one.names]


@pytest.mark.parametrize(
    "shape, settings, gives",
    [
        ((8, 6), {"split_rows": (5, 3)}, "56.0 for (5, 6), 36.0 for (3, 6)"),
        ((8, 4, 3, 3), {"conv_mode": "batched"}, "28.0 for (8, 4)"),
    ],
    ids=str,
)
def test_a_function_is_compared_by_what_it_gives_to_each_matrix(kernel, rank, shape, settings, gives):
    """Of fused rows, and of a convolution with nine positions, among which an update is divided by 3."""
    p = nn.Parameter(on([0, 1, 2, 3], [Shard(0)], torch.ones(2, *shape[1:]), shape))
    group = {"params": [("up.weight", p)], "adjust_lr_fn": lambda rows, cols: 10.0 * rows + cols, **settings}
    groups = kernel.Muon([group]).param_groups
    (terms,) = kernel.plan.terms.terms_of(groups, "", [0], {}, None, {}).values()
    assert f"<lambda>, which gives {gives}'" in terms.lines[0]


def test_a_number_in_a_tensor_of_the_host_is_compared_by_its_value(kernel, rank):
    groups = kernel.Muon([("up.weight", nn.Parameter(torch.ones(4, 4)))]).param_groups
    terms = kernel.plan.terms.Terms(**{**dict.fromkeys(kernel.plan.terms.Terms._fields), "group_positions": ((0, 0),)})
    terms, texts = terms._replace(kernels=""), []
    for rate in (0.5, torch.tensor(0.5), 0.25, torch.tensor(0.25), torch.tensor(0.5, device="meta")):
        groups[0]["lr"] = rate
        texts.append(terms.settings(groups))
    assert texts[0] == texts[1] != texts[2] == texts[3] and texts[4] not in texts[:4]


@pytest.mark.parametrize("device, state", [("cpu", "frozen"), ("meta", "trained")])
def test_parameters_without_state_are_frozen_unless_they_are_on_meta(kernel, rank, device, state):
    p = on([0, 1, 2, 3], [Shard(0)], torch.ones(2, 6, device=device), (8, 6))
    groups = kernel.Muon([("up.weight", nn.Parameter(p))]).param_groups
    (terms,) = kernel.plan.terms.terms_of(groups, "", [0], {}, None, {}).values()
    assert state in terms.lines[0].split(kernel.plan.terms.BETWEEN)


def test_ranks_share_what_they_have_in_whatever_order(kernel, rank):
    """Meshes of the same ranks in another order are one set, which a group of processes has in rising order."""
    meshes = {"a.weight": [0, 1, 2, 3], "b.weight": [3, 1, 2, 0]}
    named = {name: on(mesh, [Shard(0)], torch.ones(2, 6), (8, 6)) for name, mesh in meshes.items()}
    ((ranks, terms),) = terms_of(kernel, named).items()
    assert ranks == (0, 1, 2, 3) and sorted(terms.names) == sorted(named)


def test_only_shards_of_the_fallback_are_counted_by_the_ranks_that_have_a_part(kernel, rank):
    """Rank 3 has no part of three elements or columns. Weights of the ranks of a set sum to 0."""
    all_ranks, left = [0, 1, 2, 3], 0 if rank == 3 else 1
    named = {
        "up.weight": on(all_ranks, [Shard(0)], torch.ones(2, 6), (8, 6)),
        "copied.bias": on(all_ranks, [Replicate()], torch.ones(3)),
        "up.bias": on(all_ranks, [Shard(0)], torch.ones(left), (3,)),
        "wte.weight": on(all_ranks, [Shard(1)], torch.ones(8, left), (8, 3)),
    }
    (terms,) = terms_of(kernel, named).values()
    (shards,) = terms.local_shards
    here = [terms.names[i] for i in shards.positions]
    expected = ([], 0) if rank == 3 else (["up.bias", "wte.weight"], -2)
    assert shards.sets == ((0, 1, 2),) and (here, shards.weight) == expected
    assert terms.weight == (1 if rank == 3 else -3)


@pytest.mark.parametrize("ranks, sets", [([[0, 1], [2, 3]], ((0, 2), (1, 3))), ([[3, 2], [1, 0]], ((1, 3), (0, 2)))])
def test_copies_are_compared_by_the_ranks_that_have_one_of_the_same_part(kernel, rank, ranks, sets):
    """Of one element the ranks of the second part have nothing to compare; what has no copy is not compared."""
    # Named, because torch caches meshes, and with them the groups of worlds that have ended.
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=(f"copies {ranks}", f"parts of rank {rank}"))
    left = 1 if rank in sets[0] else 0
    named = {
        "whole.bias": on(mesh, [Replicate(), Replicate()], torch.ones(3)),
        "cut.bias": on(mesh, [Replicate(), Shard(0)], torch.ones(left), (1,)),
        "up.weight": on(mesh, [Shard(1), Shard(0)], torch.ones(2, 3), (4, 6)),
    }
    (terms,) = terms_of(kernel, named).values()
    whole, cut = terms.copies
    assert whole.sets == ((0, 1, 2, 3),) and whole.weight == terms.weight == (1 if rank == 3 else -3)
    assert cut.sets == sets and (cut.set_index, cut.weight) == (1 - left, 1 if rank == 3 else -1)
    assert [[terms.names[i] for i in each.positions] for each in (whole, cut)] == [["whole.bias"], left * ["cut.bias"]]
