"""Groups of a model inside wrappers, with adapters or shared modules, are those of the model alone."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.support.model_of_many_kinds import Network, chosen


class Model(nn.Module):
    """Tells its head, whose name does not, and what does not decay."""

    def __init__(self):
        super().__init__()
        self.pe = nn.Parameter(torch.zeros(8, 24))
        self.block = nn.Linear(24, 24)
        self.final = nn.ModuleDict({"to_tokens": nn.Linear(24, 40, bias=False)})

    def get_output_embeddings(self):
        return self.final["to_tokens"]

    def no_weight_decay(self):
        return {"pe"}


class Wrapper(nn.Module):
    """As DistributedDataParallel, which forwards no attributes."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def decays(groups):
    return {name: group.get("weight_decay") for group in groups for name, _ in group["params"]}


@pytest.mark.parametrize(
    "wrap, prefix",
    [
        (Wrapper, "module."),
        (torch.compile, "_orig_mod."),
        (lambda model: Wrapper(torch.compile(model)), "module._orig_mod."),
        (torch.optim.swa_utils.AveragedModel, "module."),
    ],
    ids=["ddp", "compiled", "ddp of compiled", "averaged"],
)
def test_wrappers_change_nothing_but_names(kernel, wrap, prefix):
    plain, wrapped = kernel.groups_for(Model()), kernel.groups_for(wrap(Model()))
    assert chosen(plain)["final.to_tokens.weight"] == "output_head" and decays(plain)["pe"] == 0.0
    for table in (chosen, decays):
        assert table(wrapped) == {f"{prefix}{name}": value for name, value in table(plain).items()}


class Itself(Model):
    """As a model that is used with and without a wrapper: callers always ask for its `module`."""

    @property
    def module(self):
        return self


class Circle(Model):
    """Two models that name each other."""

    def __init__(self):
        super().__init__()
        self.__dict__["module"] = Model()
        self.module.__dict__["_orig_mod"] = self


@pytest.mark.parametrize("model", [Itself, Circle])
def test_a_model_that_names_itself_as_wrapped_is_unwrapped_once(kernel, model):
    assert chosen(kernel.groups_for(model())) == chosen(kernel.groups_for(Model()))


def test_lora_of_a_head_that_only_the_model_tells_stays_with_adamw(kernel):
    """As PEFT puts it in: the layer becomes one around it and its factors."""
    model = Model()
    for parent, key in ((model.final, "to_tokens"), (model, "block")):
        adapted = nn.Module()
        adapted.base_layer = getattr(parent, key) if parent is model else parent[key]
        adapted.lora_A = nn.ModuleDict({"default": nn.Linear(24, 8, bias=False)})
        adapted.lora_B = nn.ModuleDict({"default": nn.Linear(8, 40, bias=False)})
        parent.add_module(key, adapted)
    assert chosen(kernel.groups_for(model)) == {
        "pe": "embedding",
        "block.base_layer.weight": "matrix",
        "block.base_layer.bias": "vector",
        "block.lora_A.default.weight": "lora:a",
        "block.lora_B.default.weight": "lora:b",
        "final.to_tokens.base_layer.weight": "output_head",
        "final.to_tokens.lora_A.default.weight": "output_head",
        "final.to_tokens.lora_B.default.weight": "output_head",
    }


def test_a_wrapped_models_config_is_read(kernel):
    model = nn.ModuleDict({"attn": nn.ModuleDict({"q_proj": nn.Linear(24, 24, bias=False)})})
    model.config = type("Config", (), {"head_dim": 8})()
    assert chosen(kernel.groups_for(Wrapper(model)))["module.attn.q_proj.weight"] == "queries: 24x24 split 8+8+8"


class SelfAttention(nn.Module):
    """Known by its class alone."""

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.query = checkpoint_wrapper(nn.Linear(32, 32, bias=False))


def test_wrappers_around_layer_and_attention_do_not_hide_it(kernel):
    model = nn.ModuleDict({"mix": checkpoint_wrapper(SelfAttention())})
    (reason,) = chosen(kernel.groups_for(model)).values()
    assert reason == "queries: 32x32 split 4*8"


def test_shared_modules_come_once(kernel):
    """Whichever of their names comes first: an encoder and a decoder, or one layer twice."""
    model = nn.Module()
    model.a = nn.Linear(24, 24, bias=False)
    model.b = model.a
    model.inner = nn.ModuleDict({"again": nn.ModuleDict({"deeper": model.a}), "tok": nn.Embedding(40, 24)})
    model.shared = model.inner["tok"]
    assert chosen(kernel.groups_for(model)) == {"a.weight": "matrix", "inner.tok.weight": "embedding"}


@pytest.mark.parametrize("names", ["pe", 5, [5]], ids=str)
def test_what_does_not_decay_is_told_by_names(kernel, names):
    model = Network()
    model.no_weight_decay = names
    with pytest.raises(TypeError, match=r"no_weight_decay must return names, .* got "):
        kernel.groups_for(model)
    model.no_weight_decay = ["tok.weight"]
    assert decays(kernel.groups_for(model))["tok.weight"] == 0.0
