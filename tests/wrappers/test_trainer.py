"""The factory does what the Hugging Face Trainer asks of one, and what accelerate does to its optimizer is survived."""

import copy
import importlib

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from tests.support.small_model import same_bits, take_steps
from tests.support.trained_network import Fused, Network

# By hand from `Trainer.get_decay_parameter_names`.
BLOCK = {"q_proj.weight": True, "q_proj.bias": False, "LayerNorm.weight": False, "q_norm.weight": False}
BLOCK |= {"normalizer.weight": True, "ln_1.weight": False, "ln_1.bias": False}
DECAYED = {"embed_tokens.weight": True, "norm.weight": False}
DECAYED |= {f"layers.{i}.{name}": decayed for i in range(2) for name, decayed in BLOCK.items()}
SETTINGS = dict(lr=0.02, adamw_lr=0.003, weight_decay=0.25)


@pytest.fixture(scope="module")
def trainer(kernel):
    return importlib.import_module(".interop.trainer", kernel.__name__)


@pytest.fixture
def create_optimizer(trainer):
    """Make an optimizer as `Trainer.create_optimizer` does of what is no subclass of torch.optim.Optimizer."""

    def create(model, **settings):
        return trainer.MuonFactory()(model, **{"args": None, **SETTINGS, **settings})

    return create


def named(optimizer):
    return {name: p for group in optimizer.param_groups for name, p in zip(group["param_names"], group["params"])}


def test_trainer_takes_it_for_a_factory(trainer):
    assert not issubclass(trainer.MuonFactory, torch.optim.Optimizer)


def test_groups_decay_what_the_trainer_decays(create_optimizer):
    model = Network()
    optimizer = create_optimizer(model)
    weight_decays = {name: g["weight_decay"] for g in optimizer.param_groups for name in g["param_names"]}
    assert weight_decays == {name: 0.25 if decayed else 0.0 for name, decayed in DECAYED.items()}
    params = dict(model.named_parameters())
    assert all(p is params[name] for name, p in named(optimizer).items())


def test_names_route_parameters_and_set_learning_rates(create_optimizer):
    groups = create_optimizer(Network()).param_groups
    routes = {name: (g["use_muon"], g["lr"], g["lr_factor"]) for g in groups for name in g["param_names"]}
    matrices = {"layers.0.q_proj.weight", "layers.1.q_proj.weight"}
    assert routes == {name: (True, 0.02, 1.0) if name in matrices else (False, 0.02, 0.003 / 0.02) for name in DECAYED}


def decays(optimizer):
    return {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]}


def test_layer_norm_as_the_model_is_told_by_names(create_optimizer):
    """As the Trainer does: it looks at the types of a model's children."""
    assert decays(create_optimizer(nn.LayerNorm(8))) == {"weight": 0.25, "bias": 0.0}


def test_model_without_weights_to_decay(create_optimizer):
    assert decays(create_optimizer(nn.Sequential(nn.LayerNorm(8)))) == {"0.weight": 0.0, "0.bias": 0.0}


def test_groups_of_unnamed_parameters_are_refused(trainer):
    with pytest.raises(TypeError, match=r"the model is needed, .* got list"):
        trainer.MuonFactory()([{"params": [Parameter(torch.ones(8, 8))]}])


@pytest.mark.parametrize("key", ["heads", "gate_up"])
def test_flags_in_quotes_are_refused(create_optimizer, key):
    with pytest.raises(TypeError, match=f"{key} must be True or False, got 'no'"):
        create_optimizer(Fused(), **{key: "no"})


@pytest.mark.parametrize(
    "options, parts",
    [
        ({}, "24+24+24"),
        ({"heads": True}, "9*8"),
        ({"patterns": {"*.c_attn.weight": {"split_rows": (36, 36)}}}, "36+36"),
    ],
    ids=str,
)
def test_modules_say_what_weights_are(create_optimizer, options, parts):
    """Layers in one weight are apart, and heads where that is asked for."""
    rows = {row.name: row for row in create_optimizer(Fused(), **options).explain().rows}
    assert rows["words.weight"].reason == "embedding" and rows["to_words.weight"].reason == "output_head"
    assert rows["attn.c_attn.weight"].branch == "muon"
    assert rows["attn.c_attn.weight"].reason.endswith(f": 72x24 split {parts}")


def test_muons_groups_come_first(create_optimizer):
    """The Trainer logs the learning rate of the first."""
    branches = [group["use_muon"] for group in create_optimizer(Fused()).param_groups]
    assert branches == sorted(branches, reverse=True) and set(branches) == {True, False}


def test_scheduler_scales_every_group(create_optimizer):
    optimizer = create_optimizer(Network())
    before = [group["lr"] for group in optimizer.param_groups]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [lr / 2 for lr in before]


def test_resumed_trainer_run_continues_bit_for_bit(create_optimizer, tmp_path):
    model = Network()
    optimizer = create_optimizer(model)
    take_steps(optimizer, named(optimizer), range(2))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    other_model = copy.deepcopy(model)
    other = create_optimizer(other_model, lr=1.0)
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    take_steps(optimizer, named(optimizer), range(2, 4))
    take_steps(other, named(other), range(2, 4))
    assert same_bits(model.state_dict(), other_model.state_dict())


def test_loading_own_state_back_changes_nothing(create_optimizer):
    """accelerate puts the state on a device that way, tensor by tensor in dicts of the same type."""
    model = Network()
    twin = copy.deepcopy(model)
    optimizer, other = create_optimizer(model), create_optimizer(twin)
    state_dict = other.state_dict()
    state = {i: {key: value.to("cpu") for key, value in tensors.items()} for i, tensors in state_dict["state"].items()}
    other.load_state_dict({**state_dict, "state": state})
    take_steps(optimizer, named(optimizer), range(2))
    take_steps(other, named(other), range(2))
    assert same_bits(model.state_dict(), twin.state_dict())


def test_scaler_around_a_patched_step_works(create_optimizer):
    """accelerate puts a function in the place of `step` while its GradScaler runs."""
    model = Network()
    optimizer = create_optimizer(model)
    original, called = optimizer.step, []
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    for p in named(optimizer).values():
        p.grad = torch.full_like(p, 4.0)
    optimizer.step = lambda *arguments, **options: called.append(original(*arguments, **options))
    scaler.step(optimizer)
    optimizer.step = original
    assert len(called) == 1 and optimizer.state[model.norm.weight]["exp_avg"].unique().item() == pytest.approx(0.1)


def test_parameters_replaced_by_preparing_are_followed(create_optimizer):
    """accelerate under FSDP2 first puts placeholders of one element there, then the sharded parameters."""
    model = Network()
    twin = copy.deepcopy(model)
    optimizer, other = create_optimizer(model), create_optimizer(twin)
    for group in other.param_groups:
        for i, p in enumerate(group["params"]):
            group["params"][i] = torch.empty(1, dtype=p.dtype)
    replaced = {name: Parameter(p.detach().clone()) for name, p in named(optimizer).items()}
    for group in other.param_groups:
        group["params"] = [replaced[name] for name in group["param_names"]]
    take_steps(optimizer, named(optimizer), range(2))
    take_steps(other, replaced, range(2))
    assert same_bits(replaced, named(optimizer))
    assert len(other.state_dict()["state"]) == len(DECAYED)
