"""Weight decay does what its mode says, as a number and as a tensor."""

import math

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import matrix, named_parameters, take_steps

pytestmark = pytest.mark.kernels_ci


def decayed(kernel, mode, p, gradient, lr, decay):
    """The step of one matrix, in float64."""
    factor = kernel.orthogonalize(gradient.double(), dtype=torch.float64) * 0.2 * math.sqrt(max(p.shape))
    p = p.double()
    keep = 1 - decay if mode == "independent" else 1 - lr * decay
    return (p * keep if mode != "cautious" else torch.where(p * factor > 0, p * keep, p)) - lr * factor


@pytest.mark.parametrize("mode", ["decoupled", "independent", "cautious"])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["numbers", "tensors"])
def test_decay_follows_its_mode(kernel, mode, as_tensor):
    p = Parameter(matrix(12, 20, 0, torch.float64))
    lr, decay = (torch.tensor(v, dtype=torch.float64) if as_tensor else v for v in (0.1, 0.3))
    optimizer = kernel.Muon([p], lr=lr, weight_decay=decay, decay_mode=mode, momentum=0.0, ns_dtype="float32")
    gradient = matrix(12, 20, 1, torch.float64)
    p.grad, expected = gradient.clone(), decayed(kernel, mode, p.detach(), gradient, 0.1, 0.3)
    optimizer.step()
    # The iteration is in float32: its roundings, amplified by the product of all a, times lr and multiplier.
    gain = math.prod(a for a, _, _ in kernel.polar_express())
    torch.testing.assert_close(p.detach(), expected, rtol=0, atol=0.1 * 0.2 * 20**0.5 * gain * 2**-23)


def test_decay_modes_differ_from_each_other(kernel):
    p, gradient = matrix(12, 20, 0), matrix(12, 20, 1)
    results = [decayed(kernel, mode, p, gradient, 0.1, 0.3) for mode in ("decoupled", "independent", "cautious")]
    assert min((a - b).abs().max() for a in results for b in results if a is not b) > 0.01


@pytest.mark.parametrize("fallback", ["adamw", "nadamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensor_weight_decay_is_live_and_equals_the_number(kernel, fallback, dtype):
    """In half precision, too, where a factor of 1 - lr * weight_decay of its own would round to 1."""
    results = []
    for decay in (0.1, torch.tensor(9.0)):
        params = named_parameters(dtype)
        optimizer = kernel.Muon(params.items(), lr=2.0**-8, weight_decay=decay, fallback=fallback)
        if isinstance(decay, torch.Tensor):
            decay.fill_(0.1)
        take_steps(optimizer, params, range(3))
        results.append(params)
    for name in results[0]:
        # The factor is rounded to float32 before it is applied, not after.
        torch.testing.assert_close(results[0][name], results[1][name], rtol=2**-22, atol=2**-22)
