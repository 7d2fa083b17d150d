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


def halved(kernel, first, second):
    """An optimizer for two layers whose query and key weights are on a device each, all ones and without gradients."""
    names = [(f"layers.{i}.{role}_proj.weight", at) for i, at in enumerate((first, second)) for role in "qk"]
    weights = {name: torch.ones(8, 16).to(at) for name, at in names}
    options = dict(lr=0.0, ns_dtype=torch.float32, qk_clip={"head_dim": 4, "threshold": 100})
    return kernel.Muon(weights.items(), **options), weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_reversed", [False, True], ids=["cpu last", "cpu first"])
def test_weights_on_two_devices_are_clipped_by_logits_of_either(portable_kernel, kind, is_reversed):
    """Each layer's logits are where the layer is, or where the other one is."""
    with narrow_device(portable_kernel, kind) as narrow:
        devices = (torch.device("cpu"), narrow.device) if is_reversed else (narrow.device, torch.device("cpu"))
        optimizer, weights = halved(portable_kernel, *devices)
        for expected, seen in ((0.5, devices), (0.25, devices[::-1])):
            for layer, at in enumerate(seen):
                optimizer.observe_qk_logits(layer, torch.tensor([400.0, 1.0]).to(at))
            for p in weights.values():
                p.grad = torch.zeros_like(p)
            optimizer.step()
            optimizer.zero_grad()  # the modelled device has no norms of a list on two devices
            assert optimizer.metrics()["heads_clipped"].item() == 2
            for p in weights.values():
                assert p.cpu()[:, 0].tolist() == pytest.approx([expected] * 4 + [1.0] * 4)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weights_on_two_devices_are_clipped(portable_kernel, kind):
    with narrow_device(portable_kernel, kind) as narrow:
        optimizer, weights = halved(portable_kernel, narrow.device, torch.device("cpu"))
        for layer in range(2):
            optimizer.observe_qk_logits(layer, torch.tensor([400.0, 1.0]))
        optimizer.step()
        for p in weights.values():
            assert p.cpu()[:, 0].tolist() == pytest.approx([0.5] * 4 + [1.0] * 4)


@pytest.mark.parametrize("kind", KINDS)
def test_observed_logits_go_with_a_model_that_is_moved(portable_kernel, kind):
    """A half of it, from the CPU to where the other half is."""
    with narrow_device(portable_kernel, kind) as narrow:
        optimizer, _ = halved(portable_kernel, torch.device("cpu"), narrow.device)
        optimizer.observe_qk_logits(0, torch.tensor([400.0, 1.0]))
        (group,) = optimizer.param_groups
        group["params"][:] = [p.to(narrow.device) for p in group["params"]]
        optimizer.step()
        assert optimizer.metrics()["heads_clipped"].item() == 1
        assert group["params"][0].cpu()[:, 0].tolist() == pytest.approx([0.5] * 4 + [1.0] * 4)
