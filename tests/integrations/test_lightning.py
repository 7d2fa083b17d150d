"""Lightning and Fabric

Give `groups_for` the LightningModule. One optimizer holds both branches, so optimization stays automatic.
"""

import itertools
import logging

import lightning
import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from tests.integrations.training import LanguageModel, batches, branches, copied, train
from tests.support.small_model import same_bits

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]
PRECISIONS = ["32-true", "bf16-mixed", "16-mixed"]


@pytest.fixture
def module(optimizer):
    # <use>
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = LanguageModel()

        def training_step(self, batch, _):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return optimizer.Muon(optimizer.groups_for(self), lr=0.02)

    # </use>
    return Module


@pytest.fixture
def trainer(tmp_path):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
    return lambda **options: lightning.Trainer(accelerator="cpu", default_root_dir=tmp_path, **{**quiet, **options})


def loader(count):
    return DataLoader(batches(count), batch_size=None)


def test_equals_a_plain_loop(optimizer, module, trainer):
    """The Trainer gives the bits of a plain loop."""
    lit, model = module(), LanguageModel()
    trainer(max_epochs=1, enable_checkpointing=False, gradient_clip_val=1.0).fit(lit, loader(20))
    opt = optimizer.Muon(optimizer.groups_for(model), lr=0.02)
    assert set(branches(lit.optimizers(use_pl_optimizer=False)).items()) == {
        (f"model.{name}", branch) for name, branch in branches(opt).items()
    }
    opt.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) and None)
    losses = train(model, opt, batches(20))
    assert losses[-1] < 0.8 * losses[0] and same_bits(copied(lit.model), copied(model))


@pytest.mark.parametrize("precision, clip", list(itertools.product(PRECISIONS, [None, 1.0])))
def test_each_precision_with_and_without_clipping_resumes_with_the_same_bits(module, trainer, precision, clip):
    """With every precision, with and without clipping, a run resumes with the same bits."""
    options = dict(precision=precision, gradient_clip_val=clip)
    straight, resumed = module(), module()
    first = trainer(max_epochs=1, **options)
    first.fit(straight, loader(4))
    saved = first.checkpoint_callback.best_model_path
    trainer(max_epochs=2, enable_checkpointing=False, **options).fit(straight, loader(4), ckpt_path=saved)
    trainer(max_epochs=2, enable_checkpointing=False, **options).fit(resumed, loader(4), ckpt_path=saved)
    whole = module()
    trainer(max_epochs=2, enable_checkpointing=False, **options).fit(whole, loader(4))
    assert same_bits(copied(whole), copied(resumed)) and same_bits(copied(whole), copied(straight))


@pytest.mark.parametrize("precision, clip", list(itertools.product(PRECISIONS, [None, 1.0])))
def test_fabric_trains_and_resumes_with_the_same_bits(optimizer, tmp_path, precision, clip):
    """Fabric trains, and resumes with the same bits."""
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)

    def set_up():
        model = LanguageModel()
        return fabric.setup(model, optimizer.Muon(optimizer.groups_for(model), lr=0.02))

    def run(model, opt, data):
        for batch in data:
            opt.zero_grad()
            loss = model(**batch)["loss"]
            fabric.backward(loss)
            if clip is not None:
                fabric.clip_gradients(model, opt, max_norm=clip)
            opt.step()
        return loss.item()

    data = batches(16)
    (model, opt), (other, other_opt) = set_up(), set_up()
    run(model, opt, data[:4])
    fabric.save(tmp_path / "state.ckpt", {"model": model, "opt": opt})
    assert run(model, opt, data[4:]) < 4.4  # ln(128) is 4.85
    fabric.load(tmp_path / "state.ckpt", {"model": other, "opt": other_opt})
    run(other, other_opt, data[4:])
    assert same_bits(copied(model), copied(other))
