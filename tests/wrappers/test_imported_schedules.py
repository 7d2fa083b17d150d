"""After an import a new scheduler goes on where those of the source were."""

from functools import partial

import pytest
import torch

from tests.support.imported_rates import (
    ADAMW,
    MUON,
    ROUNDED,
    groups_with_rates,
    halves,
    imported,
    rates,
    under_one_rate,
)
from tests.support.published_muons import MATRICES, REST
from tests.support.small_model import named_parameters


@pytest.mark.parametrize("make", [halves, groups_with_rates])
@pytest.mark.parametrize("steps", [1, 4, 9], ids=["begin", "middle", "end"])
def test_a_schedule_goes_on_where_the_source_was(kernel, make, steps):
    """Made with `last_epoch`, which torch's constructor advances by one; the last rate is 0."""

    def schedule(step):
        return 1 - step / 9

    optimizer, now = make(kernel), schedule(steps)
    imported(kernel, optimizer, lr=[now * MUON, now * ADAMW], initial_lr=[MUON, ADAMW])
    assert rates(optimizer) == pytest.approx([now * MUON, now * ADAMW], **ROUNDED)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule, last_epoch=steps - 1)
    assert rates(optimizer) == pytest.approx([now * MUON, now * ADAMW], **ROUNDED)
    optimizer.step()
    scheduler.step()
    following = schedule(steps + 1)
    assert rates(optimizer) == pytest.approx([following * MUON, following * ADAMW], **ROUNDED)
    if make is halves:
        assert len({group["lr"] for group in optimizer.param_groups}) == 1


SCHEDULERS = {
    "lambda": partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "cosine": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=9),
    "exponential": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
    "warmup and cosine": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6),
        ],
        milestones=[3],
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("steps", [2, 5])
def test_a_scheduler_that_has_caught_up_goes_on_as_those_of_the_source(kernel, scheduler, steps):
    """As the FAQ says."""
    params, schedule = named_parameters(), SCHEDULERS[scheduler]
    muon = torch.optim.Muon([params[name] for name in MATRICES], lr=MUON)
    adamw = torch.optim.AdamW([params[name] for name in REST], lr=ADAMW)
    old = [schedule(muon), schedule(adamw)]
    optimizer = halves(kernel, lr=MUON)
    new = schedule(optimizer)
    for each in [*old, new] * steps:
        each.step()
    kernel.import_state(optimizer, muon.state_dict(), adamw_state_dict=adamw.state_dict())
    for _ in range(3):
        expected = [each.param_groups[0]["lr"] for each in (muon, adamw)]
        # One formula of a scheduler has at most eight roundings at each step.
        assert rates(optimizer) == pytest.approx(expected, rel=8 * 8 * 2**-53, abs=0)
        for each in (*old, new):
            each.step()


def test_at_one_place_of_a_schedule_both_halves_have_one_value(kernel):
    """Rounding alone does not part them: a shared tensor stays shared, and so does what a logger shows."""
    generator = torch.Generator().manual_seed(0)
    for muon, adamw, share in torch.rand(40, 3, generator=generator, dtype=torch.float64).tolist():
        optimizer = halves(kernel)
        imported(kernel, optimizer, lr=[share * muon, share * adamw], initial_lr=[muon, adamw])
        assert [group["initial_lr"] for group in optimizer.param_groups] == [muon, muon]
        assert len({group["lr"] for group in optimizer.param_groups}) == 1


@pytest.mark.parametrize("rate", [MUON / 8, 0.0], ids=["later", "not begun"])
def test_unlike_schedules_of_the_source_go_on_from_their_bases(kernel, rate):
    optimizer, share = halves(kernel), rate / MUON
    (note,) = imported(kernel, optimizer, lr=[MUON / 2, share * ADAMW], initial_lr=[MUON, ADAMW])
    assert note.startswith("group 1: its rate is") and "different places of a schedule" in note
    assert rates(optimizer) == pytest.approx([MUON / 2, share * ADAMW], **ROUNDED)
    torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5, lambda step: share], last_epoch=7)
    assert rates(optimizer) == pytest.approx([MUON / 2, share * ADAMW], **ROUNDED)


def test_adamws_file_in_the_middle_of_a_schedule_gives_the_ratio_of_its_base(kernel):
    params = named_parameters()
    adamw = torch.optim.AdamW(params.values(), lr=ADAMW)
    torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 0.5)
    optimizer = halves(kernel, lr=0.08)
    kernel.import_state(optimizer, adamw.state_dict(), "adamw")
    assert rates(optimizer) == pytest.approx([0.08, ADAMW / 2], **ROUNDED)
    assert under_one_rate(optimizer, 0.08) == pytest.approx([0.08, ADAMW], **ROUNDED)
