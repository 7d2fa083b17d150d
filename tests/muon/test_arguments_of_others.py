"""Arguments that other optimizers have: the error names what to write here, and nothing that only sounds like it."""

import pytest
import torch
from torch.nn import Parameter


@pytest.mark.parametrize(
    "name, words",
    [
        ("muon_lr", ": write lr"),  # DeepSpeed's
        ("adam_lr", ": write adamw_lr"),
        ("lr_muon", ": write lr"),
        ("lr_adamw", ": write adamw_lr"),
        ("muon_params", r": write params, all of them: model\.named_parameters\(\), or \[{'params': .*"),  # Moonlight's
        ("adamw_params", r": write params, all of them: model\.named_parameters\(\), or \[{'params': .*"),
        ("adamw_wd", ": write adamw_weight_decay"),  # Keller Jordan's, once
        ("weight_decay_method", ": write decay_mode"),  # Emerging-Optimizers'
        ("fallback_lr", ": write adamw_lr"),
        ("ns_eps", ": write eps"),
        ("backend", ": leave it out"),
        ("backend_steps", ": write ns_steps"),
        ("epsilon", ": write eps"),
        ("ns_iters", ": write ns_steps"),
        ("nestrov", ": write nesterov"),
        ("adjust_lr", ": write adjust_lr_fn"),
        ("adam_betas", ": write adamw_betas"),
        ("hyperball", ": write experimental_hyperball=True"),
        ("aurora", ': write equalize="experimental_aurora"'),
        ("named_parameters", r": write them first, or params=\.\.\."),
        ("warmup_steps", r": write a scheduler .*LinearLR"),  # not `warmup`, which compiles kernels
        ("decay", ""),  # resembles decay_mode
        ("rank", ""),
    ],
)
def test_an_argument_of_others_is_answered_by_its_name_here_or_by_none(kernel, name, words):
    with pytest.raises(TypeError, match=f"^Muon has no argument {name}{words}$"):
        kernel.Muon([Parameter(torch.ones(8, 8))], **{name: 1})
