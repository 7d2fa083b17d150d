"""What TrainingArguments say reaches the optimizer that the Trainer makes, or is refused or named."""

import importlib
import warnings
from types import SimpleNamespace

import pytest
import torch

from tests.support.small_model import same_bits
from tests.support.trained_network import Fused, Network


@pytest.fixture(scope="module")
def trainer(kernel):
    return importlib.import_module(".interop.trainer", kernel.__name__)


ARGUMENTS = dict(learning_rate=3e-4, weight_decay=0.01, adam_beta1=0.8, adam_beta2=0.99, adam_epsilon=1e-6)


def test_arguments_of_the_trainer_count_and_settings_go_before_them(trainer):
    (first, *_, last) = trainer.MuonFactory()(Fused(), args=SimpleNamespace(**ARGUMENTS)).param_groups
    assert (first["lr"], first["weight_decay"], first["use_muon"]) == (3e-4, 0.01, True)
    assert (last["lr"], last["adamw_betas"], last["adamw_eps"], last["use_muon"]) == (3e-4, (0.8, 0.99), 1e-6, False)
    settings = dict(lr=0.02, adamw_eps=1e-5)
    (first, *_, last) = trainer.MuonFactory()(Fused(), args=SimpleNamespace(**ARGUMENTS), **settings).param_groups
    assert (first["lr"], first["weight_decay"], last["adamw_eps"]) == (0.02, 0.01, 1e-5)


@pytest.mark.parametrize("field", ["optim_args", "optim_target_modules"])
def test_arguments_that_cannot_count_are_refused_by_name(trainer, field):
    with pytest.raises(ValueError, match=rf"TrainingArguments have {{'{field}': 'momentum=0.9'}}"):
        trainer.MuonFactory()(Fused(), args=SimpleNamespace(**ARGUMENTS, **{field: "momentum=0.9"}))


def test_arguments_of_another_kind_are_refused(trainer):
    with pytest.raises(TypeError, match=r"must be the Trainer's TrainingArguments, got dict without \['learning_rate'"):
        trainer.MuonFactory()(Fused(), args=ARGUMENTS)


def test_arguments_that_do_not_count_are_named_once(trainer):
    """The Trainer passes none on: without them a user's `weight_decay` would be ignored in silence."""
    with pytest.warns(UserWarning, match="weight_decay, adam_beta1, adam_beta2, adam_epsilon are ignored") as caught:
        trainer.MuonFactory()(Fused(), lr=0.02)
    assert [warning.filename for warning in caught] == [__file__]
    complete = dict(lr=0.02, weight_decay=0.1, adamw_betas=(0.9, 0.95), adamw_eps=1e-8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.MuonFactory()(Fused(), **complete)
        trainer.MuonFactory()(Fused(), args=None, lr=0.02)


@pytest.fixture
def trains(trainer, transformers, tmp_path):
    """Make a real Trainer, whose arguments are those of the caller and few others."""
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    data = [{"input_ids": torch.arange(i, i + 6) % 16, "labels": torch.arange(i + 1, i + 7) % 16} for i in range(16)]

    def make(steps=6, adamw_lr=None, **options):
        args = transformers.TrainingArguments(
            output_dir=tmp_path / "run", max_steps=steps, save_steps=3, per_device_train_batch_size=4, use_cpu=True,
            report_to=[], lr_scheduler_type="constant", disable_tqdm=True, **{**ARGUMENTS, **options},
        )  # fmt: skip
        # The Trainer's files do not hold tied weights of a model that is not transformers' own.
        model, factory = Network(tied=False), (trainer.MuonFactory, {"args": args, "adamw_lr": adamw_lr})
        return transformers.Trainer(model, args, train_dataset=data, optimizer_cls_and_kwargs=factory)

    return make


@pytest.mark.integrations
def test_trainer_groups_trains_and_resumes(trains):
    def run(resume=None):
        running = trains()
        running.train(resume_from_checkpoint=resume)
        return running

    straight = run()
    groups = straight.optimizer.param_groups
    decayed = {name for group in groups if group["weight_decay"] for name in group["param_names"]}
    names = straight.get_decay_parameter_names(straight.model)
    assert decayed == {name for name in names if "frozen" not in name}
    folder = straight.args.output_dir
    assert same_bits(straight.model.state_dict(), run(f"{folder}/checkpoint-3").model.state_dict())
    assert not same_bits(straight.model.state_dict(), Network(tied=False).state_dict())


@pytest.mark.integrations
def test_trainers_arguments_reach_the_optimizer_and_it_explains_itself(trains):
    running = trains(steps=1, adamw_lr=1e-3, logging_steps=1)
    made = running.create_optimizer()
    rows = {row.name: row.branch for row in made.explain().rows}
    assert rows["embed_tokens.weight"] == rows["lm_head.weight"] == "adamw"
    assert rows["layers.0.q_proj.weight"] == "muon"
    running.train()
    assert running.optimizer.optimizer is made
    assert running.state.log_history[0]["learning_rate"] == 3e-4
    for group in made.param_groups:
        assert group["weight_decay"] in (0.01, 0.0)
        assert (group["adamw_betas"], group["adamw_eps"]) == ((0.8, 0.99), 1e-6)


@pytest.mark.integrations
def test_an_optimizer_that_the_factory_made_by_hand_trains_alike(trainer, trains):
    by_factory, model = trains(), Network(tied=False)
    made = trainer.MuonFactory()(model, args=by_factory.args)
    data = by_factory.train_dataset
    by_hand = type(by_factory)(model, by_factory.args, train_dataset=data, optimizers=(made, None))
    for running in (by_factory, by_hand):
        running.train()
    assert same_bits(by_factory.model.state_dict(), by_hand.model.state_dict())
