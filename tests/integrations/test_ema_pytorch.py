"""ema-pytorch

The average is of the model, and needs nothing of its optimizer.
"""

import pytest
import torch
from ema_pytorch import EMA

from tests.integrations.training import LanguageModel, batches, copied, train

pytestmark = pytest.mark.integrations


def test_average_follows_what_muon_trains(optimizer):
    """The average follows the weights that Muon trains.

    From the first step on, each update moves the average by a tenth of the way to the weights.
    """
    model = LanguageModel()
    # <use>
    opt = optimizer.Muon(optimizer.groups_for(model), lr=0.02)
    average = EMA(model, beta=0.9, update_after_step=0, update_every=1)
    # </use>
    average.update()  # copies
    data, losses, expected = batches(20), [], copied(model)
    for batch in data:
        losses += train(model, opt, [batch])
        average.update()
        step = 1 - average.get_current_decay()
        expected = {name: torch.lerp(expected[name], value, step) for name, value in copied(model).items()}
    assert losses[-1] < 0.8 * losses[0]
    torch.testing.assert_close(dict(average.ema_model.state_dict()), expected)
