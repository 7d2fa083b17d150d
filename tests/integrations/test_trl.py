"""TRL

Trainers of TRL hand the factory on to transformers' Trainer.
"""

import datasets
import peft
import pytest
import torch
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.integrations.training import LENGTH, VOCABULARY, branches, text
from tests.support.small_model import same_bits

pytestmark = pytest.mark.integrations


@pytest.fixture
def tokenizer():
    """A character a token, with no file to download."""
    vocabulary = {chr(code): code for code in range(VOCABULARY)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=chr(0)))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=chr(1), eos_token=chr(2), unk_token=chr(0)
    )


@pytest.fixture
def train_dataset():
    tokens = text()
    return datasets.Dataset.from_dict({"input_ids": tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH).tolist()})


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=VOCABULARY))


@pytest.fixture
def arguments(tmp_path):
    transformers.logging.set_verbosity_error()
    common = dict(output_dir=str(tmp_path / "run"), per_device_train_batch_size=8, use_cpu=True, bf16=False)
    common |= dict(
        report_to=[], disable_tqdm=True, logging_steps=1, save_strategy="no", max_steps=20, learning_rate=0.02
    )
    return lambda **options: trl.SFTConfig(**{**common, **options})


def test_supervised_fine_tuning_lowers_the_loss(optimizer, model, arguments, train_dataset, tokenizer):
    """Supervised fine-tuning lowers the loss."""
    args = arguments()
    # <use>
    muon = (optimizer.MuonFactory, {"args": args})
    trainer = trl.SFTTrainer(
        model, args, train_dataset=train_dataset, processing_class=tokenizer, optimizer_cls_and_kwargs=muon
    )
    trainer.train()
    # </use>
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.9 * losses[0]
    chosen = branches(trainer.optimizer.optimizer)
    assert chosen["model.embed_tokens.weight"] == chosen["lm_head.weight"] == "adamw"
    assert chosen["model.layers.0.self_attn.q_proj.weight"] == "muon"


def test_resumed_adapters_end_with_the_same_bits(optimizer, arguments, train_dataset, tokenizer, tmp_path):
    """A resumed run with adapters ends with the same bits."""
    args = arguments(save_strategy="steps", save_steps=4, max_steps=8, gradient_accumulation_steps=2)

    def run(resume=None):
        torch.manual_seed(0)
        sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
        trainer = trl.SFTTrainer(
            transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=VOCABULARY)),
            args, train_dataset=train_dataset, processing_class=tokenizer,
            optimizer_cls_and_kwargs=(optimizer.MuonFactory, {"args": args}),
            peft_config=peft.LoraConfig(r=8, target_modules="all-linear"),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model.state_dict()

    assert same_bits(run(), run(str(tmp_path / "run" / "checkpoint-4")))
