"""Schedule-Free

Its wrapper goes around Muon. Its average takes the place of a decaying learning rate. Call `opt.eval()` before the
model is evaluated, and `opt.train()` before it is trained on.
"""

import copy

import pytest
import schedulefree

from tests.integrations.training import LanguageModel, batches, copied, train
from tests.support.small_model import same_bits

pytestmark = pytest.mark.integrations


def test_loss_falls_at_the_average(optimizer):
    """The loss falls at the average of the weights."""
    model = LanguageModel()
    # <use>
    muon = optimizer.Muon(optimizer.groups_for(model), lr=0.02, weight_decay=0.0)
    opt = schedulefree.ScheduleFreeWrapper(muon, momentum=0.9, weight_decay_at_y=0.1)
    opt.train()
    # </use>
    losses = train(model, opt, batches(30))
    opt.eval()
    (batch,) = batches(1, seed=1)
    assert model(**batch)["loss"].item() < 0.8 * losses[0]


def test_checkpoint_goes_on_with_the_same_bits(optimizer):
    """After a checkpoint training goes on with the same bits."""
    data = batches(8)

    def wrapped(model):
        muon = optimizer.Muon(optimizer.groups_for(model), lr=0.02, weight_decay=0.0)
        opt = schedulefree.ScheduleFreeWrapper(muon, momentum=0.9)
        opt.train()
        return opt

    model, other_model = LanguageModel(), LanguageModel()
    opt = wrapped(model)
    train(model, opt, data[:4])
    # The number of steps is the wrapper's, and no state of an optimizer: the library keeps it in the groups.
    saved, weights = copy.deepcopy(opt.state_dict()), copied(model)
    train(model, opt, data[4:])
    other_model.load_state_dict(weights)
    other = wrapped(other_model)
    other.load_state_dict(saved)
    train(other_model, other, data[4:])
    assert same_bits(model.state_dict(), other_model.state_dict())
