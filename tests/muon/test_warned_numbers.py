"""Rates and decays that do what few users mean are a warning where a group is made, at the user's line."""

import re
import warnings

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import named_parameters

RATIO = r"adamw_lr=0\.003 has no ratio to lr={} .* sets one lr for all groups will set AdamW's .* Write the largest lr"
DECAY = r"weight_decay=0\.1 with decay_mode='independent' removes 10 % of {} in every step, .* Usual is .* 0\.002"


def late_group(**settings):
    return {"params": [("late.bias", Parameter(torch.ones(8)))], **settings}


@pytest.mark.parametrize("lr", [0.0, 5e-324])
def test_a_rate_without_a_ratio_is_a_warning(kernel, lr):
    """A schedule that sets one `lr` for all groups then sets AdamW's to it."""
    with pytest.warns(UserWarning, match=RATIO.format(lr)) as raised:
        optimizer = kernel.Muon(named_parameters().items(), lr=lr, adamw_lr=0.003)
    assert [warning.filename for warning in raised] == [__file__]
    for group in optimizer.param_groups:
        group["lr"] = 0.02
    assert [group["lr"] * group["lr_factor"] for group in optimizer.param_groups] == [0.02, 0.02]
    late = late_group(lr=lr, adamw_lr=0.003)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=RATIO.format(lr)):
            optimizer.add_param_group(late)
    assert len(optimizer.param_groups) == 2
    with pytest.warns(UserWarning, match=RATIO.format(lr)) as raised:
        optimizer.add_param_group(late)
    assert [warning.filename for warning in raised] == [__file__]


@pytest.mark.parametrize(
    "settings",
    [
        dict(lr=0.0),
        dict(lr=0.0, adamw_lr=0.0),
        dict(lr=0.02, adamw_lr=0.003),
        dict(lr=0.02, adamw_lr=0.0),
        dict(lr=1e-5, adamw_lr=3e-5),  # lr times their ratio is another number in the last digit
        dict(lr=0.0, adamw_lr=torch.tensor(0.003)),
        dict(lr=torch.tensor(0.0), adamw_lr=0.003),
    ],
    ids=str,
)
def test_rates_that_have_a_ratio_or_are_tensors_are_no_warning(kernel, settings):
    """Nor are those of matrices alone, which have no rate of AdamW."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel.Muon(named_parameters().items(), **settings)
        kernel.Muon([("up.weight", Parameter(torch.ones(8, 8)))], lr=0.0, adamw_lr=0.003)


def test_no_rate_of_adamw_on_a_device_is_compared(kernel):
    """To read it would wait for the device; here it cannot be read at all."""
    here, elsewhere = torch.tensor(0.003), torch.empty((), device="meta")
    for default, lr in ((0.003, elsewhere), (elsewhere, here)):
        groups = [{"use_muon": False, "lr": lr, "lr_factor": 1.0, "weight_decay": 0.1}]
        defaults = {"adamw_lr": default, "adamw_weight_decay": None}
        assert kernel.parameters.advice.idle_adamw_arguments(groups, defaults) == []


@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_independent_decay_that_takes_much_in_every_step_is_a_warning(kernel, as_tensor):
    """As with the default, which is meant for the other modes. `explain()` has it as long as it is so."""
    decay = {"weight_decay": torch.tensor(0.1, dtype=torch.float64)} if as_tensor else {}
    of_all = DECAY.format("up.weight, down.weight, wte.weight and 2 more")
    with pytest.warns(UserWarning, match=of_all) as raised:
        optimizer = kernel.Muon(named_parameters().items(), lr=0.02, decay_mode="independent", **decay)
    assert [warning.filename for warning in raised] == [__file__]
    assert re.search(of_all, " ".join(optimizer.explain().notes))
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.002
    assert not re.search(DECAY.format(".*"), " ".join(optimizer.explain().notes))
    with pytest.warns(UserWarning, match=DECAY.format("late.bias")):
        optimizer.add_param_group(late_group(weight_decay=0.1))


def test_a_hundredth_in_every_step_is_much(kernel):
    with pytest.warns(UserWarning, match=r"weight_decay=0\.01 with decay_mode='independent' removes 1 % of"):
        kernel.Muon(named_parameters().items(), decay_mode="independent", weight_decay=0.01)


def test_a_decay_on_a_device_is_not_read(kernel):
    """To read it would wait for the device; here it cannot be read at all."""
    group = kernel.Muon(named_parameters().items(), decay_mode="independent", weight_decay=0.0).param_groups[0]
    group["weight_decay"] = torch.empty((), device="meta")
    assert kernel.parameters.rates.fast_decay([group]) == []


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"decay_mode": "cautious"},
        {"decay_mode": "corrected"},
        {"decay_mode": "independent", "weight_decay": 0.002},
        {"decay_mode": "independent", "experimental_hyperball": True, "adamw_weight_decay": 0.002},
    ],
    ids=str,
)
def test_usual_decay_is_no_warning(kernel, settings):
    """Nor is one in a group that keeps the norms of its matrices, which do not decay."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel.Muon(named_parameters().items(), lr=0.02, **settings)
