"""The factory does what the Hugging Face Trainer asks of one, and what accelerate does to its optimizer is survived."""

import copy
import importlib

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from tests.support.small_model import same_bits, take_steps

pytestmark = pytest.mark.kernels_ci


class Scale(nn.Module):
    """A norm that is no nn.LayerNorm: the Trainer knows it by name or not at all."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(torch.ones(8))

    def forward(self, x):
        return self.weight * x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(8, 8)
        self.LayerNorm = Scale()
        self.q_norm = Scale()
        self.normalizer = Scale()
        self.ln_1 = nn.LayerNorm(8)

    def forward(self, x):
        return self.q_proj(self.normalizer(self.q_norm(self.LayerNorm(self.ln_1(x)))))


class Network(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = Scale()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.lm_head = nn.Linear(8, 16, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids, labels=None):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.lm_head(self.frozen(self.norm(x)))
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


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
        return trainer.MuonFactory()(model, **{**SETTINGS, **settings})

    return create


def named(optimizer):
    return {name: p for group in optimizer.param_groups for name, p in zip(group["param_names"], group["params"])}


def test_trainer_takes_it_for_a_factory(trainer):
    assert not issubclass(trainer.MuonFactory, torch.optim.Optimizer)


def test_groups_decay_what_the_trainer_decays(create_optimizer):
    model = Network()
    optimizer = create_optimizer(model)
    found = {name: g["weight_decay"] for g in optimizer.param_groups for name in g["param_names"]}
    assert found == {name: 0.25 if decayed else 0.0 for name, decayed in DECAYED.items()}
    own = dict(model.named_parameters())
    assert all(p is own[name] for name, p in named(optimizer).items())


def test_names_route_parameters_and_set_learning_rates(create_optimizer):
    groups = create_optimizer(Network()).param_groups
    found = {name: (g["use_muon"], g["lr"], g["lr_factor"]) for g in groups for name in g["param_names"]}
    matrices = {"layers.0.q_proj.weight", "layers.1.q_proj.weight"}
    assert found == {name: (True, 0.02, 1.0) if name in matrices else (False, 0.02, 0.003 / 0.02) for name in DECAYED}


def test_layer_norm_as_the_model_is_told_by_names(trainer):
    """As the Trainer does: it looks at the types of a model's children."""
    weights, biases = (group["params"] for group in trainer.decay_groups(nn.LayerNorm(8)))
    assert [name for name, _ in weights + biases] == ["weight", "bias"]


def test_model_without_weights_to_decay_has_one_group(trainer):
    (group,) = trainer.decay_groups(nn.Sequential(nn.LayerNorm(8)))
    assert group["weight_decay"] == 0.0 and len(group["params"]) == 2


def test_groups_of_unnamed_parameters_are_refused(trainer):
    with pytest.raises(TypeError, match=r"the model is needed, .* got list"):
        trainer.MuonFactory()([{"params": [Parameter(torch.ones(8, 8))]}])


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
    state = {i: {key: value.to("cpu") for key, value in own.items()} for i, own in state_dict["state"].items()}
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


def test_trainer_groups_trains_and_resumes(trainer, tmp_path):
    transformers = pytest.importorskip("transformers")
    data = [{"input_ids": torch.arange(i, i + 6) % 16, "labels": torch.arange(i + 1, i + 7) % 16} for i in range(16)]

    def run(steps, resume=None):
        arguments = transformers.TrainingArguments(
            output_dir=tmp_path / "run", max_steps=steps, save_steps=3, per_device_train_batch_size=4, use_cpu=True,
            report_to=[], lr_scheduler_type="constant", weight_decay=0.25, disable_tqdm=True,
        )  # fmt: skip
        # The Trainer's files do not hold tied weights of a model that is not transformers' own.
        model, factory = Network(tied=False), (trainer.MuonFactory, SETTINGS)
        running = transformers.Trainer(model, arguments, train_dataset=data, optimizer_cls_and_kwargs=factory)
        decayed = [name for group in trainer.decay_groups(model)[:1] for name, _ in group["params"]]
        assert decayed == [name for name in running.get_decay_parameter_names(model) if "frozen" not in name]
        running.train(resume_from_checkpoint=resume)
        return running.model.state_dict()

    straight = run(6)
    assert same_bits(straight, run(6, resume=str(tmp_path / "run/checkpoint-3")))
    assert not same_bits(straight, Network(tied=False).state_dict())
