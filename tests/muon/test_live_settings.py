"""Settings that are changed in a group count from the next step on, each in the way of an optimizer made with it."""

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import named_parameters, same_bits, take_steps

# A value of each setting that changes a step, and what else a step needs to show it.
CHANGES = {
    "lr": (0.01, {}),
    "weight_decay": (0.5, {}),
    "momentum": (0.5, {}),
    "nesterov": (False, {}),
    "ns_coefficients": ("quintic", {}),
    "eps": (1e3, {}),
    "ns_steps": (3, {}),
    "adjust_lr_fn": ("original", {}),
    "update_rms": (0.1, {}),
    "ns_dtype": ("float64", {}),
    "ns_method": ("gram_float32", {"ns_dtype": "bfloat16"}),
    "equalize": ("rows", {}),
    "renormalize": ("frobenius", {}),
    "second_moment": ("rows", {}),
    "second_moment_beta": (0.5, {"second_moment": "rows"}),
    "experimental_hyperball": (True, {}),
    "decay_mode": ("independent", {}),
    "maximize": (True, {}),
    "conv_mode": ("batched", {}),
    "normalize_spatial": (False, {"conv_mode": "batched"}),
    "fallback": ("nadamw", {}),
    "adamw_betas": ((0.5, 0.6), {}),
    "adamw_eps": (1e-2, {}),
}


@pytest.mark.parametrize("key", CHANGES)
def test_each_setting_of_a_group_is_live(kernel, key):
    """Two steps after a change have the bits of an optimizer that was made with the value, and not those of before."""
    value, beside = CHANGES[key]
    live, fixed, plain = ({**named_parameters(), "conv.weight": Parameter(torch.ones(8, 4, 3, 3))} for _ in range(3))
    optimizer = kernel.Muon(live.items(), **beside)
    for group in optimizer.param_groups:
        group[key] = value
    take_steps(optimizer, live, range(2))
    take_steps(kernel.Muon(fixed.items(), **{**beside, key: value}), fixed, range(2))
    take_steps(kernel.Muon(plain.items(), **beside), plain, range(2))
    assert same_bits(live, fixed) and not same_bits(live, plain)
