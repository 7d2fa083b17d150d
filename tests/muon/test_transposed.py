"""Weights (in, out) are worked on as the (out, in) that they are."""

import pytest
import torch
from torch.nn import Parameter


@pytest.mark.parametrize("shape, split", [((16, 40), (24, 8, 8)), ((40, 16), None), ((3, 16, 24), (12, 12))], ids=str)
def test_transposed_weights_are_stepped_as_their_transposes(kernel, shape, split):
    """Bit for bit, with the multiplier of (out, in), which for these adjustments is not that of (in, out)."""
    generator = torch.Generator().manual_seed(0)
    weight, *gradients = (torch.randn(shape, generator=generator) for _ in range(3))
    turned, plain = Parameter(weight.clone()), Parameter(weight.mT.contiguous())
    options = dict(lr=0.1, adjust_lr_fn="rms_to_rms", stacked=True)
    groups = [{"params": [("w", p)], "split_rows": split} for p in (turned, plain)]
    optimizers = [kernel.Muon([{**groups[0], "transposed": True}], **options), kernel.Muon(groups[1:], **options)]
    for gradient in gradients:
        turned.grad, plain.grad = gradient.clone(), gradient.mT.contiguous()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(turned, plain.mT) and not torch.equal(turned, weight)
    first, second = (optimizer.explain().rows[0] for optimizer in optimizers)
    assert first.multiplier == second.multiplier and "transposed" in first.reason


@pytest.mark.parametrize(
    "shape, settings, words",
    [
        ((16, 40), {"split_rows": (8, 8)}, r"split_rows of w must sum to its 40 rows, 8\+8 gives 16"),
        (
            (8, 4, 3),
            {"stacked": False},
            r"transposed=True is for matrices \(in, out\) and stacks of them, w is \(8, 4, 3\)",
        ),
    ],
)
def test_what_has_no_transpose_is_refused(kernel, shape, settings, words):
    with pytest.raises(ValueError, match=words):
        kernel.Muon([{"params": [("w", Parameter(torch.ones(shape)))], "transposed": True, **settings}])
