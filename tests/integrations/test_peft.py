"""PEFT

Muon updates both factors of an adapter. Heads and tables that PEFT trains whole, `modules_to_save`, stay with AdamW.
Start with the rate that you would give AdamW.
"""

import copy

import peft
import pytest
import torch
import transformers

from tests.integrations.training import VOCABULARY, batches, branches, copied, train
from tests.support.small_model import same_bits

pytestmark = pytest.mark.integrations
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, vocab_size=VOCABULARY))


def test_adapters_train_and_their_base_stays(optimizer):
    """Adapters train, and the weights below them stay as they are."""
    model = llama()
    # <use>
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
    opt = optimizer.Muon(optimizer.groups_for(model), lr=2e-3)
    # </use>
    before, data = copied(model), batches(1) * 20
    losses = train(model, opt, data)
    assert losses == sorted(losses, reverse=True)  # of one batch; slowly, under a head of random weights, which stays
    assert set(branches(opt).values()) == {"muon"} and all(".lora_" in name for name in branches(opt))
    assert all(torch.equal(value, before[name]) for name, value in copied(model).items() if ".lora_" not in name)


def test_head_of_a_classifier_is_no_matrix(optimizer):
    """AdamW updates the head of a classifier, and Muon its adapters.

    PEFT keeps a trained copy of it under `modules_to_save`.
    """
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, num_labels=8))
    adapted = peft.get_peft_model(bert, peft.LoraConfig(task_type="SEQ_CLS", r=8))
    chosen = branches(optimizer.Muon(optimizer.groups_for(adapted), lr=0.02))
    assert chosen["base_model.model.classifier.modules_to_save.default.weight"] == "adamw"
    assert {branch for name, branch in chosen.items() if ".lora_" in name} == {"muon"}


def test_resized_embeddings_train_with_adamw(optimizer):
    """AdamW updates resized embeddings and heads that PEFT trains whole."""
    model = llama()
    model.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
    config = peft.LoraConfig(r=8, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    model = peft.get_peft_model(model, config)
    opt = optimizer.Muon(optimizer.groups_for(model), lr=0.02)
    chosen = branches(opt)
    saved = [name for name in chosen if "modules_to_save" in name]
    assert len(saved) == 2 and {chosen[name] for name in saved} == {"adamw"}
    losses = train(model, opt, batches(20))
    assert losses[-1] < 0.9 * losses[0]


def test_resumed_adapters_go_on_with_the_same_bits(optimizer, tmp_path):
    """Saved adapters and their optimizer go on with the same bits."""
    config = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
    model, data = peft.get_peft_model(llama(), config), batches(8)
    opt = optimizer.Muon(optimizer.groups_for(model), lr=0.02)
    train(model, opt, data[:4])
    model.save_pretrained(tmp_path)
    torch.save(opt.state_dict(), tmp_path / "optimizer.pt")
    train(model, opt, data[4:])
    other = peft.PeftModel.from_pretrained(llama(), tmp_path, is_trainable=True)
    other_opt = optimizer.Muon(optimizer.groups_for(other), lr=0.02)
    other_opt.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    train(other, other_opt, data[4:])
    assert same_bits(copy.copy(copied(model)), copied(other))
