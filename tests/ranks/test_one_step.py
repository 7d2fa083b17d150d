"""Ranks that do not take the same step: all of them raise, say who differs, and nothing has moved."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks.test_failures import error_of_step, everything
from tests.support.backends import on_every_backend
from tests.support.inside import muon_settings
from tests.support.rank_pool import device_of_ranks
from tests.support.sharded_models import LAYOUTS, Case, Layout, Spec, part_of

pytestmark = on_every_backend()

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


def step_without(kernel, case: Case, number: int, ranks: tuple[int, ...]):
    """Some ranks have no gradient of a parameter; return the error, and whether nothing moved and training goes on."""
    optimizer, params = built(kernel, case)
    set_gradients(case, params, 1)
    optimizer.step()
    before = everything(optimizer, params)
    set_gradients(case, params, 2)
    if dist.get_rank() in ranks:
        params[number].grad = None
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
        optimizer.state_dict()
    unmoved = all(map(torch.equal, before, everything(optimizer, params)))
    set_gradients(case, params, 3)
    optimizer.step()
    return str(caught.value), unmoved and not all(map(torch.equal, before, everything(optimizer, params)))


@pytest.mark.parametrize("number", range(len(MODEL)), ids=[spec.name for spec in MODEL])
@pytest.mark.parametrize("ranks", [(2,), (2, 3), (0, 1)], ids=str)
def test_gradient_on_some_copies_raises_with_name_and_ranks(pools, number, ranks):
    """Before anything moves, and once: with all gradients training goes on."""
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
        optimizer.state_dict()
    return str(caught.value), bool((p == 1).all() and (q == 1).all())


def test_plain_copies_need_their_gradients_together(pools):
    for error, unmoved in pools(4).run(steps_of_plain_copies, 1):
        assert "part of a.weight, ranks [0, 2, 3] had a gradient and ranks [1] had none" in error
        assert unmoved


def two_in_turn(kernel, case: Case, swapped: bool, skips: bool):
    """Two optimizers of like parameters; the last rank may step them in another order, or leave one of them out.

    Returns the first error, its kind, and whether nothing had moved; None without one.
    """
    actor, critic = (built(kernel, case) for _ in range(2))
    odd = dist.get_rank() == 3
    for step in range(1, 4):
        order = [actor, critic]
        if odd and swapped:
            order.reverse()
        if odd and skips and step == 2:
            order = [critic]
        for optimizer, params in order:
            set_gradients(case, params, step)
            before = everything(optimizer, params)
            try:
                optimizer.step()
                optimizer.state_dict()
            except (RuntimeError, ValueError) as error:
                return type(error).__name__, str(error), all(map(torch.equal, before, everything(optimizer, params)))
    return None


@pytest.mark.parametrize("case", ["swapped", "skips"])
def test_optimizers_of_like_parameters_are_told_apart(pools, case):
    """An actor and a critic, say, of the same names, shapes and settings."""
    specs = (Spec("up.weight", (12, 8), LAYOUTS["rows"]), Spec("up.bias", (12,), LAYOUTS["rows"]))
    for kind, error, unmoved in pools(4).run(two_in_turn, Case(specs), case == "swapped", case == "skips"):
        assert kind == ("ValueError" if case == "swapped" else "RuntimeError")
        assert "optimizer 1" in renumbered(error) and "optimizer 2" in renumbered(error)
        assert "rank 3" in error
        assert unmoved


def unlike_in_turn(kernel):
    """An optimizer of many sets of copies and one of none, of which the last rank leaves the first one out once."""
    cases = Case(MODEL), Case((Spec("up.weight", (12, 8), LAYOUTS["rows"]),))
    pairs = [(case, *built(kernel, case)) for case in cases]
    for step in range(1, 4):
        for case, optimizer, params in pairs[step == 2 and dist.get_rank() == 3 :]:
            set_gradients(case, params, step)
            try:
                optimizer.step()
                optimizer.state_dict()
            except RuntimeError as error:
                return str(error)
    return None


def test_optimizers_of_unlike_parameters_are_told_apart(pools):
    """Whatever they have to say, the ranks' messages have one length."""
    for error in pools(4).run(unlike_in_turn):
        assert "did not take the same step" in error and "rank 3" in error


def test_optimizers_in_one_order_go_on(pools):
    specs = (Spec("up.weight", (12, 8), LAYOUTS["rows"]), Spec("up.bias", (12,), LAYOUTS["rows"]))
    assert pools(4).run(two_in_turn, Case(specs), False, False) == [None] * 4


def renumbered(error: str) -> str:
    """Return the error with the two optimizers as 1 and 2: the processes of a pool have made others before."""
    numbers = sorted({int(word.rstrip(":")) for word in error.split() if word.rstrip(":").isdigit()}, reverse=True)
    pair = next((a, b) for a, b in zip(numbers[1:], numbers) if b == a + 1 and f"optimizer {a}" in error)
    for number, stands_for in zip(pair, (1, 2)):
        error = error.replace(f"optimizer {number}", f"optimizer {stands_for}")
    return error


def steps_after_a_load(kernel, case: Case):
    """One rank has taken a step more than the others, in a world of its own, when they meet again."""
    optimizer, params = built(kernel, case)
    set_gradients(case, params, 1)
    optimizer.step()
    optimizer._agreement._steps += dist.get_rank() == 2
    return error_of_step(case, optimizer, params, 2)


def test_ranks_in_different_steps_raise(pools):
    specs = (Spec("up.weight", (12, 8), Layout((4,), ("0",))),)
    for error in pools(4).run(steps_after_a_load, Case(specs)):
        assert "rank 0 was in step 2" in error and "rank 2 in step 3" in error
