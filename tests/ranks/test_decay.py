"""Weight decay of every mode has the bits of one process on shards, for matrices and for the other parameters."""

from __future__ import annotations

import pytest
import torch

from tests.support.backends import on_every_backend
from tests.support.pairwise import pairwise
from tests.support.sharded_models import LAYOUTS, Case, Layout, Spec, assert_as_alone

# Parts of them fill no vector of torch's kernel.
SHAPES = {"embeddings.0.weight": (41, 9), "embeddings.1.weight": (3, 70), "up.weight": (13, 9), "scale": ()}
FACTORS = {
    "layout": ["rows", "columns", "hsdp", "strided rows"],
    "mode": ["independent", "cautious", "corrected"],
    "fallback": [("adamw", torch.bfloat16), ("adamw", torch.float32), ("nadamw", torch.float32)],
}


@on_every_backend()
@pytest.mark.parametrize("row", pairwise(FACTORS, seed=0), ids=lambda row: " ".join(map(str, row.values())))
def test_decay_has_the_bits_of_one_process(kernel, pools, row):
    """`corrected` decays by a fifth of the decoupled share here."""
    layout, mode, (fallback, dtype) = row["layout"], row["mode"], row["fallback"]
    group = {"decay_lr": 0.1} if mode == "corrected" else {"weight_decay": torch.tensor(0.2)}
    layouts = {name: LAYOUTS[layout] if shape else LAYOUTS["replicated"] for name, shape in SHAPES.items()}
    specs = tuple(Spec(name, shape, layouts[name], group) for name, shape in SHAPES.items())
    settings = {"lr": 0.02, "decay_mode": mode, "fallback": fallback, "ns_dtype": "float32"}
    assert_as_alone(kernel, pools, Case(specs, settings, steps=6, dtype=dtype, missing="everywhere"))


@on_every_backend()
@pytest.mark.parametrize("fallback", ["adamw", "nadamw"])
@pytest.mark.parametrize("decay_mode", ["decoupled", "corrected"])
def test_a_rate_of_adamws_beside_lr_has_the_bits_of_one_process(kernel, pools, fallback, decay_mode):
    specs = tuple(Spec(name, shape, Layout((2,), ("0" if shape else "r",))) for name, shape in SHAPES.items())
    settings = {"lr": 0.02, "adamw_lr": 0.003, "fallback": fallback, "decay_mode": decay_mode, "ns_dtype": "float32"}
    assert_as_alone(kernel, pools, Case(specs, settings, steps=3), ranks=2)
