"""timm

`groups_for` reads the model's `no_weight_decay()`. timm's factory makes a Muon of timm's under the name `muon`, unless
its registry gets this one:

```python
registry = timm.optim._optim_factory.default_registry
info = registry.get_optimizer_info("muon")
registry.register(dataclasses.replace(info, opt_class=optimizer.Muon))
opt = timm.optim.create_optimizer_v2(model, "muon", lr=0.01, param_group_fn=optimizer.groups_for)
```

Without the factory:
"""

import copy
import dataclasses

import pytest
import timm.optim
import timm.scheduler
import torch

from tests.integrations.training import branches
from tests.support.small_model import same_bits

pytestmark = pytest.mark.integrations


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = dict(img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=10)
    return timm.create_model("vit_tiny_patch16_224", **sizes)


@pytest.fixture
def registered(optimizer):
    """timm's registry, in which `muon` is ours for a test."""
    registry = timm.optim._optim_factory.default_registry
    before = registry.get_optimizer_info("muon")
    registry.register(dataclasses.replace(before, opt_class=optimizer.Muon))
    yield
    registry.register(before)


def images(count):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(20) % 10
    pictures = torch.randn(10, 3, 16, 16, generator=generator)[labels]
    return [(pictures + 0.1 * torch.randn(pictures.shape, generator=generator), labels) for _ in range(count)]


def train(model, opt, data):
    losses = []
    for pictures, labels in data:
        loss = torch.nn.functional.cross_entropy(model(pictures), labels)
        losses.append(loss.item())
        opt.zero_grad()
        loss.backward()
        opt.step()
    return losses


def test_groups_decay_what_timm_decays_and_train(optimizer, model):
    """Weight decay applies to the parameters to which timm applies it."""
    from timm.optim import param_groups_weight_decay

    # <use>
    groups = optimizer.groups_for(model)  # what model.no_weight_decay() names does not decay
    opt = optimizer.Muon(groups, lr=0.01, weight_decay=0.05)
    # </use>
    losses = train(model, opt, images(20))
    assert losses[-1] < 0.5 * losses[0]
    chosen = branches(opt)
    assert chosen["patch_embed.proj.weight"] == chosen["pos_embed"] == chosen["head.weight"] == "adamw"
    assert chosen["blocks.0.attn.qkv.weight"] == chosen["blocks.1.mlp.fc1.weight"] == "muon"
    rest, decayed = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
    assert (rest["weight_decay"], decayed["weight_decay"]) == (0.0, 0.05)
    ours = {p for group in opt.param_groups if group["weight_decay"] for p in group["params"]}
    assert ours == set(decayed["params"])


def test_factory_makes_muon_of_the_groups(optimizer, model, registered):
    """timm's factory makes the optimizer that the call above makes."""
    twin = copy.deepcopy(model)
    opt = timm.optim.create_optimizer_v2(model, "muon", lr=0.01, momentum=0.95, param_group_fn=optimizer.groups_for)
    assert isinstance(opt, optimizer.Muon)
    other = optimizer.Muon(optimizer.groups_for(twin), lr=0.01, weight_decay=0.0, eps=1e-7)
    train(model, opt, images(3))
    train(twin, other, images(3))
    assert same_bits(model.state_dict(), twin.state_dict())


def test_lookahead_trains_and_its_checkpoint_goes_on_with_the_same_bits(optimizer, model):
    """Lookahead trains, and resumes with the same bits."""
    other_model, data = copy.deepcopy(model), images(12)

    def lookahead(model):
        return timm.optim.Lookahead(optimizer.Muon(optimizer.groups_for(model), lr=0.02), k=2)

    opt = lookahead(model)
    losses = train(model, opt, data[:7])
    saved, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
    losses += train(model, opt, data[7:])
    assert losses[-1] < losses[0]
    other_model.load_state_dict(weights)
    resumed = lookahead(other_model)
    resumed.load_state_dict(saved)
    train(other_model, resumed, data[7:])
    assert same_bits(model.state_dict(), other_model.state_dict())


@pytest.mark.parametrize("sched", ["cosine", "step", "plateau", "tanh", "poly"])
def test_schedulers_move_both_branches_alike(optimizer, model, sched):
    """Schedulers change the rates of Muon and of AdamW by the same factor."""
    opt = optimizer.Muon(optimizer.groups_for(model), lr=0.02, adamw_lr=0.005)
    before = [group["lr"] for group in opt.param_groups]
    scheduler, _ = timm.scheduler.create_scheduler_v2(opt, sched, num_epochs=10, warmup_epochs=2, decay_epochs=3)
    train(model, opt, images(1))
    for epoch in range(1, 7):
        scheduler.step(epoch, metric=1.0)
        factors = [group["lr"] / lr for group, lr in zip(opt.param_groups, before)]
        assert factors == pytest.approx([factors[0]] * len(factors))


def test_average_of_weights_follows(optimizer, model):
    """The average of the weights follows them.

    Each step moves the average by a tenth of the way to the weights.
    """
    opt = optimizer.Muon(optimizer.groups_for(model), lr=0.02)
    average = timm.utils.ModelEmaV3(model, decay=0.9)
    expected = copy.deepcopy(model.state_dict())
    for batch in images(3):
        train(model, opt, [batch])
        average.update(model)
        expected = {name: torch.lerp(expected[name], value, 0.1) for name, value in model.state_dict().items()}
    torch.testing.assert_close(dict(average.module.state_dict()), expected)
