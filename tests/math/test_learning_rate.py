"""What each adjustment promises: the size of the update it makes of a polar factor."""

import re

import pytest
import torch

from tests.support.spectra import SPECTRA, with_spectrum

SHAPES = [(32, 32), (48, 16), (16, 48)]

pytestmark = pytest.mark.kernels_ci


def update(kernel, name, rows, cols):
    factor = with_spectrum(SPECTRA["flat"](min(rows, cols)), rows, cols, seed=0)
    return kernel.learning_rate.step_multiplier(name, rows, cols) * factor


@pytest.mark.parametrize("rows, cols", SHAPES)
def test_match_rms_adamw_gives_an_rms_of_one_fifth(kernel, rows, cols):
    assert update(kernel, "match_rms_adamw", rows, cols).square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-12)


@pytest.mark.parametrize("rows, cols", SHAPES)
def test_update_rms_is_the_rms_of_an_update(kernel, rows, cols):
    factor = update(kernel, "original", rows, cols) / kernel.learning_rate.step_multiplier("original", rows, cols)
    scaled = kernel.learning_rate.step_multiplier("match_rms_adamw", rows, cols, 0.18) * factor
    assert scaled.square().mean().sqrt().item() == pytest.approx(0.18, rel=1e-12)
    # Rounded once, as in the published formula: a ratio to the default would be rounded, too.
    assert kernel.learning_rate.step_multiplier("match_rms_adamw", rows, cols, 0.18) == 0.18 * max(rows, cols) ** 0.5


@pytest.mark.parametrize("rows, cols", SHAPES)
@pytest.mark.parametrize("name", ["original", None])
def test_original_gives_the_spectral_norm_of_torchs_muon(kernel, name, rows, cols):
    norm = torch.linalg.matrix_norm(update(kernel, name, rows, cols), ord=2).item()
    assert norm == pytest.approx(max(1, rows / cols) ** 0.5, rel=1e-12)
    assert kernel.learning_rate.step_multiplier(name, rows, cols) == pytest.approx(
        torch.optim._muon._adjust_lr(1.0, "original", torch.Size((rows, cols)))
    )


@pytest.mark.parametrize("rows, cols", SHAPES)
@pytest.mark.parametrize("name", ["rms_to_rms", "spectral_unclamped"])  # ours, and torch's from 2.14 on
def test_rms_to_rms_gives_an_rms_operator_norm_of_one(kernel, name, rows, cols):
    W = update(kernel, name, rows, cols)
    x = torch.linalg.svd(W).Vh[0]  # the input that is stretched most
    stretched = (W @ x).square().mean().sqrt() / x.square().mean().sqrt()
    assert stretched.item() == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("name", ["rms", ["original"]], ids=str)
def test_unknown_adjustment_is_named(kernel, name):
    words = f"{name!r} is none of original, match_rms_adamw, rms_to_rms, spectral_unclamped"
    with pytest.raises(ValueError, match=re.escape(words)):
        kernel.learning_rate.step_multiplier(name, 4, 4)
