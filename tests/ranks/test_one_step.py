"""Ranks that do not take the same step: all of them raise, say who differs, and nothing has moved."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.ranks.test_failures import error_of_step, everything
from tests.support.backends import on_every_backend, read_last_step
from tests.support.inside import muon_settings
from tests.support.pieces import mesh_of
from tests.support.rank_pool import device_of_ranks
from tests.support.sharded_models import LAYOUTS, Case, Layout, Spec, part_of

# Copies are on ranks 0 and 2, 1 and 3. The large matrix is worth sending, so that they share the work on it; of the
# others each copy does all, and AdamW's are nobody else's work.
HSDP = LAYOUTS["hsdp"]
SMALL = Spec("layers.0.up.weight", (12, 8), HSDP)
LARGE = Spec("layers.1.up.weight", (384, 400), HSDP)
WHOLE = Spec("layers.2.up.weight", (12, 8), LAYOUTS["replicated"])
BIAS = Spec("layers.0.up.bias", (12,), HSDP)
TABLE = Spec("tok_embeddings.weight", (12, 8), HSDP)
MODEL = (SMALL, LARGE, WHOLE, BIAS, TABLE)


def built(kernel, case: Case, **settings):
    params = [part_of(case, i) for i in range(len(case.specs))]
    named = [(spec.name, p) for spec, p in zip(case.specs, params)]
    return kernel.Muon(named, ns_dtype="float32", **muon_settings(kernel, {**case.settings, **settings})), params


def set_gradients(case: Case, params, step: int) -> None:
    for i, p in enumerate(params):
        p.grad = part_of(case._replace(seed=step), i).data


def step_that_releases(kernel, case: Case) -> tuple[str, bool]:
    """One rank has another rate; return the error, and whether a gradient of a matrix is left."""
    optimizer, params = built(kernel, case, release_grads=True)
    set_gradients(case, params, 1)
    optimizer.step()
    set_gradients(case, params, 2)
    optimizer.param_groups[0]["lr"] = 0.5 if dist.get_rank() == 1 else 0.25
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value), any(p.grad is not None for spec, p in zip(case.specs, params) if "up.weight" in spec.name)


def test_an_error_says_that_gradients_were_released(pools):
    for error, any_left in pools(4).run(step_that_releases, Case(MODEL, {}, seed=0)):
        assert error.endswith("release_grads=True has freed gradients: run the backward pass again") and not any_left


def step_without(kernel, case: Case, number: int, ranks: tuple[int, ...]):
    """Some ranks have no gradient of a parameter; return the error, and whether nothing moved and training goes on."""
    optimizer, params = built(kernel, case)
    set_gradients(case, params, 1)
    optimizer.step()
    before = everything(optimizer, params)
    set_gradients(case, params, 2)
    params[number - 1].grad = None  # which all ranks may lack
    if dist.get_rank() in ranks:
        params[number].grad = None
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
        read_last_step(optimizer)
    unmoved = all(map(torch.equal, before, everything(optimizer, params)))
    set_gradients(case, params, 3)
    optimizer.step()
    return str(caught.value), unmoved and not all(map(torch.equal, before, everything(optimizer, params)))


@on_every_backend()
@pytest.mark.parametrize("number", range(len(MODEL)), ids=[spec.name for spec in MODEL])
@pytest.mark.parametrize("ranks", [(2,), (2, 3), (0, 1), (0, 3)], ids=str)
def test_gradient_on_some_copies_raises_with_name_and_ranks(pools, number, ranks):
    """Before anything moves, and once: with all gradients training goes on.

    Also where the first rank with one part has no gradient, and the last rank with another: codes must not cancel.
    """
    for error, as_promised in pools(4).run(step_without, Case(MODEL), number, ranks):
        assert MODEL[number].name in error
        first = next(rank for rank in range(4) if any(rank % 2 == other % 2 for other in ranks))
        if MODEL[number].layout is HSDP:  # whose first part that is at odds is named
            having = [rank for rank in (first, first + 2) if rank not in ranks]
            without = [rank for rank in (first, first + 2) if rank in ranks]
        else:
            having, without = [rank for rank in range(4) if rank not in ranks], list(ranks)
        assert f"ranks {having} had a gradient and ranks {without} had none" in error
        assert as_promised


def test_codes_of_ranks_that_have_each_others_contents_do_not_cancel(kernel):
    """Two ranks form a set in two entries, and each has in the second one what the other has in the first."""
    checksums, sets = kernel.step.agreement.checksums, kernel.plan.terms.RankSets
    entries = [[sets((), ((0, 1),), 0, weight)] * 2 for weight in (-1, 1)]
    for contents, cancel in ((("ab", "ab"), True), (("ab", "ba"), False)):
        assert (sum(map(checksums.code_of_sets, entries, contents)) == 0) == cancel


def test_codes_of_scales_do_not_cancel(kernel):
    """Of three ranks whose scales are powers of two, weighted as those of a meeting."""
    codes = kernel.step.agreement.checksums.codes_of_scales(2.0 ** torch.arange(-8, 25, dtype=torch.float32))
    sums = codes[:, None, None] + codes[:, None] - 2 * codes
    assert (sums == 0).nonzero().tolist() == [[i, i, i] for i in range(len(codes))]


SPLIT = LAYOUTS["rows"]
APART = (
    Spec("layers.0.up.bias", (12,), SPLIT),
    Spec("tok_embeddings.weight", (12, 8), SPLIT),
)


@on_every_backend()
@pytest.mark.parametrize("fallback", ["adamw", "nadamw"])
@pytest.mark.parametrize("number", range(len(APART)), ids=[spec.name for spec in APART])
def test_shards_of_the_fallback_need_their_gradients_together(pools, number, fallback):
    """Otherwise ranks would count different steps. Three of a vector's elements are on each rank."""
    for error, as_promised in pools(4).run(step_without, Case(APART, {"fallback": fallback}), number, (1, 2)):
        assert f"of {APART[number].name}, ranks [0, 3] had a gradient and ranks [1, 2] had none" in error
        assert "torch.zeros_like(p)" in error and as_promised


def step_with_an_empty_part(kernel, without: int, layout: Layout, elements: int):
    """Fewer elements than parts: ranks with none have no say. Returns whether something moved here."""
    case = Case((Spec("b.bias", (elements,), layout),))
    optimizer, (p,) = built(kernel, case)
    set_gradients(case, [p], 1)
    if dist.get_rank() == without:
        p.grad = None
    before = p.to_local().clone()
    optimizer.step()
    read_last_step(optimizer)
    return bool((p.to_local() != before).any())


@on_every_backend()
def test_ranks_with_an_empty_part_need_no_gradient(pools):
    assert pools(4).run(step_with_an_empty_part, 3, SPLIT, 2) == [True, True, False, False]
    assert pools(4).run(step_with_an_empty_part, 3, HSDP, 1) == [True, False, True, False]


def steps_of_plain_copies(kernel, without: int):
    """Under DDP, as plain parameters: one rank has no gradient of a small matrix, which nobody sends."""
    p, q = (nn.Parameter(torch.full((8, 6), 1.0, device=device_of_ranks())) for _ in range(2))
    exchange = kernel.ExchangeOptions(process_group=dist.group.WORLD)
    optimizer = kernel.Muon([("a.weight", p), ("b.bias", q)], exchange=exchange)
    p.grad = q.grad = torch.ones_like(p)
    if dist.get_rank() == without:
        p.grad = None
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
        read_last_step(optimizer)
    return str(caught.value), bool((p == 1).all() and (q == 1).all())


@on_every_backend()
def test_plain_copies_need_their_gradients_together(pools):
    for error, unmoved in pools(4).run(steps_of_plain_copies, 1):
        assert "part of a.weight, ranks [0, 2, 3] had a gradient and ranks [1] had none" in error
        assert unmoved


def disputed_under_a_scaler(kernel, case: Case):
    """A dispute under GradScaler, then two steps; return parameters, and those of an undisturbed run."""
    ends = []
    for disturbed in (True, False):
        optimizer, params = built(kernel, case)
        scaler = torch.amp.GradScaler(device_of_ranks(), init_scale=1024.0)
        scaler.scale(torch.zeros((), device=device_of_ranks()))
        for step in range(3):
            if step == 1 and not disturbed:
                continue
            set_gradients(case, params, step)
            for p in params:
                p.grad.mul_(1024.0)
            optimizer.param_groups[0]["lr"] = 0.5 if step == 1 and dist.get_rank() == 1 else 1e-3
            try:
                scaler.step(optimizer)
                read_last_step(optimizer)
            except RuntimeError:
                assert step == 1
            scaler.update(1024.0)
        ends.append([p.to_local().clone() for p in params])
    return all(map(torch.equal, *ends))


@on_every_backend()
def test_a_dispute_leaves_no_scale_behind(pools):
    assert all(pools(4).run(disputed_under_a_scaler, Case((SMALL, BIAS))))


def gradient_elsewhere(kernel):
    """A matrix and a bias on ranks 0 and 1, of which ranks 2 and 3 have gradients without elements."""
    mesh = dist.device_mesh.DeviceMesh(device_of_ranks(), [0, 1])
    params = [nn.Parameter(distribute_tensor(torch.ones(s), mesh, [Replicate()])) for s in ((6, 4), (16,))]
    optimizer = kernel.Muon([("up.weight", params[0]), ("up.bias", params[1])])
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return True


@on_every_backend()
def test_gradients_of_parameters_elsewhere_are_nothing(pools):
    assert all(pools(4).run(gradient_elsewhere))


def gradient_of_another_part(kernel):
    """A gradient whose local part has too few elements on one rank."""
    mesh = mesh_of((2, 2))
    p = nn.Parameter(distribute_tensor(torch.ones(16), mesh, [Replicate(), Shard(0)]))
    size = 3 if dist.get_rank() == 2 else 8
    local = torch.zeros(size, device=device_of_ranks())
    placed = [Replicate(), Shard(0)]
    p.grad = DTensor.from_local(local, mesh, placed, run_check=False, shape=torch.Size((16,)), stride=(1,))
    optimizer = kernel.Muon([("w", p)])
    gradients = kernel.step.gradients.Gradients([p])
    try:
        kernel.step.gradients.check_gradients(optimizer._plan_cache.premises, gradients, optimizer.param_groups)
    except ValueError as error:
        return str(error)
    return None


@on_every_backend()
def test_gradient_with_another_part_raises(pools):
    results = pools(4).run(gradient_of_another_part)
    assert "(16,)" in results[2] and "(8,)" in results[2] and "(3,)" in results[2]
    assert [results[rank] for rank in (0, 1, 3)] == [None] * 3


def steps_after_a_load(kernel, case: Case):
    """One rank has taken a step more than the others, in a world of its own, when they meet again."""
    optimizer, params = built(kernel, case)
    set_gradients(case, params, 1)
    optimizer.step()
    optimizer._agreement._steps[0, 1, 2, 3] += dist.get_rank() == 2
    optimizer.check_copies()  # which is no step
    return error_of_step(case, optimizer, params, 2)


@on_every_backend()
def test_ranks_in_different_steps_raise(pools):
    specs = (Spec("up.weight", (12, 8), Layout((4,), ("0",))),)
    for error in pools(4).run(steps_after_a_load, Case(specs)):
        assert "rank 0 was in step 2" in error and "rank 2 in step 3" in error
