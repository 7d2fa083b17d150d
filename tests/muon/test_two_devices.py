"""One optimizer for parameters on two devices, and for a model that was moved from one to another."""

from __future__ import annotations

import pytest
import torch

from tests.muon.test_narrow_device import drawn
from tests.support.narrow_device import KINDS, narrow_device

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fallback", ["adamw", "nadamw"])
def test_scaled_gradients_on_two_devices(portable_kernel, kind, fallback):
    """The scaler's tensors are on one of the devices of a model that is divided between two."""
    ends = []
    with narrow_device(portable_kernel, kind) as narrow:
        for second in (narrow.device, torch.device("cpu")):
            parameters = {
                **drawn(second, torch.float32, 0),
                "first": drawn(narrow.device, torch.float32, 2)["norm.bias"],
            }
            # Some CPUs would iterate in bfloat16.
            settings = dict(fallback=fallback, capturable=True, ns_dtype=torch.float32)
            optimizer = portable_kernel.Muon(parameters.items(), **settings)
            for p in parameters.values():
                p.grad = torch.ones_like(p) * 8.0
            optimizer.grad_scale = torch.full((), 8.0, device=narrow.device)
            optimizer.found_inf = torch.zeros(1, device=narrow.device)
            optimizer.step()
            ends.append([p.cpu() for p in parameters.values()])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_observed_where_the_model_was_moved_to(portable_kernel, kind):
    with narrow_device(portable_kernel, kind) as narrow:
        weights = [(f"attn.{role}_proj.weight", torch.randn(8, 16)) for role in "qk"]
        optimizer = portable_kernel.Muon(weights, qk_clip={"head_dim": 4})
        (group,) = optimizer.param_groups
        group["params"][:] = [p.to(narrow.device) for p in group["params"]]
        optimizer.observe_qk_logits("attn", torch.full((2,), 400.0, device=narrow.device))
        optimizer.step()
        assert optimizer.metrics()["heads_clipped"].item() == 2
