"""Hydra and OmegaConf

Lists of OmegaConf are taken as they are, so `_convert_` need not be set. `_target_` names a class in a module of yours:
with `Muon = get_kernel("org/optimizer", version=0, trust_remote_code=True).Muon` in `my_project/muon.py`, write
`_target_: my_project.muon.Muon`. Instantiate it with `model.named_parameters()`: without names embeddings look like
other matrices.
"""

import sys
import types

import hydra.utils
import pytest
from omegaconf import OmegaConf

from tests.integrations.training import LanguageModel, batches, copied, train
from tests.support.small_model import same_bits

pytestmark = pytest.mark.integrations


@pytest.mark.parametrize("conversion", ["none", "all"])
def test_settings_of_a_file_make_the_optimizer(optimizer, monkeypatch, conversion):
    """Settings from a file make the optimizer that the same settings in Python make.

    Hydra hands lists over as OmegaConf's own sequences, unless it is told to convert them.
    """
    model, twin = LanguageModel(), LanguageModel()
    # <use>
    config = OmegaConf.create(
        """
        lr: 0.02
        adamw_betas: [0.9, 0.99]
        expert_keys: [experts]
        ns_coefficients: [[3.4445, -4.7750, 2.0315]]
        """
    )
    opt = optimizer.Muon(model.named_parameters(), **config)
    # </use>
    made = OmegaConf.create({"_target_": "muon_of_a_test.Muon", "_convert_": conversion, **config})
    monkeypatch.setitem(sys.modules, "muon_of_a_test", types.SimpleNamespace(Muon=optimizer.Muon))
    instantiated = hydra.utils.instantiate(made, twin.named_parameters())
    assert train(model, opt, batches(3)) == train(twin, instantiated, batches(3))
    assert same_bits(copied(model), copied(twin))
