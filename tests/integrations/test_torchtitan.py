"""torchtitan

The registry of torchtitan's container is a list inside a method, so a subclass adds the name.
`implementation` must be `for-loop`: otherwise the container would ask for a fused or foreach AdamW, a choice that
Muon does not offer. The container passes names without modules, so a fused `wqkv` is one matrix. The fused `w13` of
its overrides, (hidden, 2, dim), stays with AdamW.
"""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from tests.integrations.training import BRANCHES, LanguageModel, batches, branches, copied, train
from tests.support.small_model import same_bits

pytestmark = pytest.mark.integrations


@pytest.fixture
def container(optimizer):
    """torchtitan's registry of optimizers is a fixed list inside a function: a subclass says one more name."""

    # <use>
    class Optimizers(OptimizersContainer):
        @dataclass(kw_only=True, slots=True)
        class Config(OptimizersContainer.Config):
            implementation: str = "for-loop"  # sets no `fused` and no `foreach`

        @staticmethod
        def _resolve_optimizer_factory(name):
            return optimizer.Muon if name == "Muon" else OptimizersContainer._resolve_optimizer_factory(name)

    muon = ParamGroupConfig(pattern=".*", optimizer_name="Muon", optimizer_kwargs={"lr": 0.02})
    config = Optimizers.Config(param_groups=[muon])  # a model's `optimizer` in its configuration
    # </use>
    return lambda model, **options: replace(config, **options).build(model_parts=[model])


def test_equals_a_plain_loop(optimizer, container):
    """The container gives the bits of a plain loop."""
    model, twin = LanguageModel(), LanguageModel()
    losses = train(model, container(model), batches(20))
    (opt,) = container(model)
    assert branches(opt) == BRANCHES and losses[-1] < 0.8 * losses[0]
    train(twin, optimizer.Muon(twin.named_parameters(), lr=0.02), batches(20))
    assert same_bits(copied(model), copied(twin))


def test_flat_state_goes_on_with_the_same_bits(container, tmp_path):
    """After a checkpoint training goes on with the same bits.

    Saved and loaded by torch.distributed.checkpoint, as torchtitan's checkpointer does.
    """
    import torch.distributed.checkpoint as dcp

    data, model, other = batches(8), LanguageModel(), LanguageModel(seed=1)
    opt = container(model)
    train(model, opt, data[:4])
    dcp.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    train(model, opt, data[4:])
    other_opt = container(other)
    loaded = {"model": other.state_dict(), "optimizer": other_opt.state_dict()}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(loaded["model"])
    other_opt.load_state_dict(loaded["optimizer"])
    train(other, other_opt, data[4:])
    assert same_bits(copied(model), copied(other))


def test_its_schedule_moves_both_branches_alike(container):
    """Its schedule changes the rates of Muon and of AdamW by the same factor."""
    model = LanguageModel()
    opts = container(model)
    schedule = LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.5).build(optimizers=opts, training_steps=8)
    (opt,) = opts
    base, seen = [schedule.schedulers[0].base_lrs, []]
    for batch in batches(8):
        seen.append([group["lr"] / lr for group, lr in zip(opt.param_groups, base)])
        train(model, opts, [batch])
        schedule.step()
    assert all(factors == pytest.approx([factors[0]] * 2) for factors in seen)
    assert len({round(factors[0], 6) for factors in seen}) > 3


def test_fused_of_the_container_is_refused(container):
    """An error says that Muon has no choice `fused`.

    It is the default there; a group may say `fused` itself as well.
    """
    with pytest.raises(ValueError, match=r"fused=True has no effect here.*Leave it out"):
        container(LanguageModel(), implementation="fused")


def test_two_model_parts_have_an_optimizer_each(container):
    """Two parts of a model have an optimizer each.

    As the stages of a pipeline on one rank; their state files do not collide.
    """
    parts = LanguageModel(), copy.deepcopy(LanguageModel())
    first, second = torch.nn.ModuleDict({"a": parts[0]}), torch.nn.ModuleDict({"b": parts[1]})
    opts = [container(first), container(second)]
    names = [set(each.state_dict()) for each in opts]
    assert not names[0] & names[1] and all(names)
