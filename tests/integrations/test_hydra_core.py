"""Hydra and OmegaConf

Settings may be lists of OmegaConf: `_convert_` need not be set. `my_muon` is a module of yours, as
[the FAQ](faq.md#my-trainer-imports-the-optimizer-by-a-name-in-a-configuration) shows.
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
def test_a_configuration_makes_the_optimizer(optimizer, monkeypatch, conversion):
    """A configuration makes the optimizer that the same settings in Python make.

    Hydra hands lists over as OmegaConf's own sequences, unless it is told to convert them.
    """
    monkeypatch.setitem(sys.modules, "my_muon", types.SimpleNamespace(Muon=optimizer.Muon))
    model, twin, third = LanguageModel(), LanguageModel(), LanguageModel()
    # <use>
    config = OmegaConf.create(
        """
        _target_: my_muon.Muon
        lr: 0.02
        adamw_betas: [0.9, 0.99]
        expert_keys: [experts]
        ns_coefficients: [[3.4445, -4.7750, 2.0315]]
        """
    )
    opt = hydra.utils.instantiate(config, model.named_parameters())
    # </use>
    converted = hydra.utils.instantiate({**config, "_convert_": conversion}, twin.named_parameters())
    settings = {"adamw_betas": (0.9, 0.99), "expert_keys": ["experts"], "ns_coefficients": [(3.4445, -4.775, 2.0315)]}
    reference = optimizer.Muon(third.named_parameters(), lr=0.02, **settings)
    expected = train(third, reference, batches(3))
    for network, each in (model, opt), (twin, converted):
        assert train(network, each, batches(3)) == expected
        assert same_bits(copied(network), copied(third))
