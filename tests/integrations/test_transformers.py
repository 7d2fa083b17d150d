"""transformers' Trainer

The Trainer makes an instance of `MuonFactory` and calls it with the model, so that Muon knows modules and names.
`args` are the TrainingArguments, whose learning rate, decay and betas are used; settings of Muon next to them take
precedence.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import transformers

from tests.integrations.test_accelerate import allow_fsdp, launched_process, whole
from tests.integrations.training import LENGTH, VOCABULARY, branches, text
from tests.support.small_model import same_bits

pytestmark = pytest.mark.integrations
SIZES = dict(n_embd=32, n_head=4, n_layer=2, vocab_size=VOCABULARY, n_positions=LENGTH)
WITHOUT_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def gpt2():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **WITHOUT_DROPOUT))


def sequences():
    tokens = text()
    return [{"input_ids": x, "labels": x} for x in tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)]


def arguments_in(folder, **options):
    transformers.logging.set_verbosity_error()
    common = dict(per_device_train_batch_size=8, use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1)
    common |= dict(output_dir=folder, save_strategy="no", max_steps=12, learning_rate=0.02, weight_decay=0.1)
    return transformers.TrainingArguments(**{**common, **options})


model, train_dataset = pytest.fixture(gpt2, name="model"), pytest.fixture(sequences, name="train_dataset")


@pytest.fixture
def arguments(tmp_path):
    return lambda **options: arguments_in(tmp_path / "run", **options)


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_loss_falls_and_routing_is_right(optimizer, model, arguments, train_dataset):
    """The loss falls, and AdamW updates embeddings, heads and norms."""
    args = arguments(max_steps=30)
    # <use>
    muon = (optimizer.MuonFactory, {"args": args})
    trainer = transformers.Trainer(model, args, train_dataset=train_dataset, optimizer_cls_and_kwargs=muon)
    trainer.train()
    print(trainer.optimizer.optimizer.explain())  # accelerate's wrapper holds Muon
    # </use>
    assert losses(trainer)[-1] < 0.8 * losses(trainer)[0]
    chosen = branches(trainer.optimizer.optimizer)
    assert chosen["transformer.wte.weight"] == chosen["transformer.wpe.weight"] == "adamw"
    assert chosen["transformer.h.0.attn.c_attn.weight"] == chosen["transformer.h.1.mlp.c_fc.weight"] == "muon"


def test_equals_a_plain_loop_with_clipping_accumulation_and_warm_up(optimizer, model, arguments, train_dataset):
    """Clipping, accumulation and a warm-up give the bits of a plain loop.

    The Trainer divides each loss by the steps that it accumulates, clips, steps and moves the rate.
    """
    twin = copy.deepcopy(model)
    options = dict(gradient_accumulation_steps=2, max_grad_norm=0.5, warmup_steps=3, lr_scheduler_type="linear")
    args = arguments(train_sampling_strategy="sequential", max_steps=4, **options)
    muon = (optimizer.MuonFactory, {"args": args})
    trainer = transformers.Trainer(model, args, train_dataset=train_dataset, optimizer_cls_and_kwargs=muon)
    trainer.train()
    opt = optimizer.MuonFactory()(twin, args=args)
    schedule = transformers.get_linear_schedule_with_warmup(opt, 3, 4)
    collated = [
        {"input_ids": x, "labels": x}
        for x in torch.stack([row["input_ids"] for row in train_dataset]).split(8)[: 2 * 4]
    ]
    for first in range(0, 8, 2):
        for batch in collated[first : first + 2]:
            # By the number of all tokens of a step, which the Trainer gives, the model divides its sum of losses.
            twin(**batch, num_items_in_batch=torch.tensor(2 * 8 * LENGTH)).loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        opt.step()
        schedule.step()
        opt.zero_grad()
    assert same_bits(model.state_dict(), twin.state_dict())


def test_resumed_run_ends_with_the_same_bits(optimizer, model, arguments, train_dataset, tmp_path):
    """A resumed run ends with the same bits."""
    args = arguments(save_strategy="steps", save_steps=6, gradient_accumulation_steps=2, warmup_steps=3)
    muon = (optimizer.MuonFactory, {"args": args})

    def run(model, resume=None):
        trainer = transformers.Trainer(model, args, train_dataset=train_dataset, optimizer_cls_and_kwargs=muon)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model.state_dict()

    other = copy.deepcopy(model)
    assert same_bits(run(model), run(other, str(tmp_path / "run" / "checkpoint-6")))


@pytest.mark.parametrize("options", [dict(bf16=True), dict(lr_scheduler_type="cosine")], ids=["bf16", "cosine"])
def test_precision_and_schedules_train(optimizer, model, arguments, train_dataset, options):
    """Other precisions and schedules train."""
    args = arguments(max_steps=20, **options)
    muon = (optimizer.MuonFactory, {"args": args})
    trainer = transformers.Trainer(model, args, train_dataset=train_dataset, optimizer_cls_and_kwargs=muon)
    trainer.train()
    assert losses(trainer)[-1] < 0.9 * losses(trainer)[0]


def test_decays_what_the_trainer_decays(optimizer, model, arguments, train_dataset):
    """Weight decay applies to the parameters to which the Trainer applies it."""
    args = arguments()
    muon = (optimizer.MuonFactory, {"args": args})
    trainer = transformers.Trainer(model, args, train_dataset=train_dataset, optimizer_cls_and_kwargs=muon)
    groups = trainer.create_optimizer().param_groups
    decayed = {name for group in groups if group["weight_decay"] for name in group["param_names"]}
    assert decayed == set(trainer.get_decay_parameter_names(model)) & dict(model.named_parameters()).keys()


def test_training_arguments_count_and_settings_beside_them_count_more(optimizer, model, arguments, train_dataset):
    """Settings beside `args` take precedence over `TrainingArguments`."""
    args = arguments(weight_decay=0.7, adam_beta1=0.3, adam_epsilon=1e-6)
    muon = (optimizer.MuonFactory, {"args": args, "weight_decay": 0.2})
    trainer = transformers.Trainer(model, args, train_dataset=train_dataset, optimizer_cls_and_kwargs=muon)
    groups = trainer.create_optimizer().param_groups
    assert {group["lr"] for group in groups} == {0.02} and {group["weight_decay"] for group in groups} == {0.0, 0.2}
    assert {(*group["adamw_betas"], group["adamw_eps"]) for group in groups} == {(0.3, 0.999, 1e-6)}


# Without clipping, because the parts of shards are summed in another order in the norm of all gradients.
IN_ORDER = dict(train_sampling_strategy="sequential", max_steps=6, warmup_steps=2, max_grad_norm=0.0)
SHARDED = dict(fsdp=True, fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT"})


def train_in_processes(kernel, folder, sharded):
    """Train, and resume from the middle: all of the model's tensors, both times, and whether the ranks share them."""
    options = dict(per_device_train_batch_size=4, save_strategy="steps", save_steps=3, ddp_backend="gloo")
    with launched_process():
        args = arguments_in(folder, **IN_ORDER, **options, **(SHARDED if sharded else {}))
        settings = {"args": args}
        if sharded:
            allow_fsdp()
        else:
            settings["exchange"] = kernel.ExchangeOptions(process_group=dist.group.WORLD)

        def run(resume=None):
            muon = (kernel.MuonFactory, settings)
            trainer = transformers.Trainer(gpt2(), args, train_dataset=sequences(), optimizer_cls_and_kwargs=muon)
            trainer.train(resume_from_checkpoint=resume)
            # What unscales gradients itself is an optimizer that ranks share.
            return whole(trainer.model), trainer.optimizer.optimizer._step_supports_amp_scaling

        first, shared = run()
        resumed, _ = run(f"{folder}/checkpoint-3")
        return first, resumed, shared


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_two_processes_equal_one_and_resume_with_the_same_bits(optimizer, arguments, pools, tmp_path, sharded):
    """Two processes train as one does that accumulates their batches, and resume with the same bits."""
    model, args = gpt2(), arguments(**IN_ORDER, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    muon = (optimizer.MuonFactory, {"args": args})
    transformers.Trainer(model, args, train_dataset=sequences(), optimizer_cls_and_kwargs=muon).train()
    expected = model.state_dict()
    for first, resumed, shared in pools(2).run(train_in_processes, str(tmp_path / "processes"), sharded):
        assert same_bits(first, expected) and same_bits(resumed, expected)
        assert shared
