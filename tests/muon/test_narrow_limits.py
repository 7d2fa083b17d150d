"""What a device without float64 refuses and decides otherwise, and what the model of such a device refuses."""

from __future__ import annotations

import pytest
import torch

from tests.muon.test_narrow_device import drawn
from tests.support.narrow_device import KINDS, narrow_device

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_refuses_what_the_device_lacks(portable_kernel, kind):
    with narrow_device(portable_kernel, kind) as found:
        x, number = torch.ones(3).to(found.device), torch.tensor(2.0, dtype=torch.float64)
        for make in (lambda: x.double(), lambda: torch.zeros(1, dtype=torch.float64, device=found.device)):
            with pytest.raises(RuntimeError, match=f"{kind}:0 has no torch.float64"):
                make()
        with pytest.raises(RuntimeError, match="has no"):
            x.sum() * number  # two tensors without a dimension have the wider dtype
        with pytest.raises(RuntimeError, match=r"operands on .* and on the CPU"):
            x + torch.ones(3)
        assert (x * number).cpu().tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_iteration_is_in_float32_and_said_to_be(portable_kernel, kind):
    with narrow_device(portable_kernel, kind) as found:
        optimizer = portable_kernel.Muon(drawn(found.device, torch.bfloat16, 0).items())
        kernels = [row.kernel for row in optimizer.explain() if row.branch == "muon"]
    assert len(kernels) == 4 and all("torch.bmm float32" in each for each in kernels)


@pytest.mark.parametrize("method", ["gram", "gram_float32"])
def test_ranks_sum_no_squared_norms_in_float32(kernel, method):
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    of = torch.float32, (64, 512), schedule, method
    assert kernel.iteration.summed_iteration(torch.device("mps"), *of) is None
    assert kernel.iteration.summed_iteration(torch.device("cpu"), *of).method == method


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{"ns_dtype": torch.float64}, {"momentum_dtype": "float64"}], ids=str)
def test_float64_is_refused_by_name(portable_kernel, kind, settings):
    """Before there is an optimizer, or before a group changes."""
    with narrow_device(portable_kernel, kind) as found:
        parameters = drawn(found.device, torch.float32, 0)
        ((key, _),) = settings.items()
        with pytest.raises(ValueError, match=f"{key} of wide.weight is torch.float64, which {kind}:0 does not have"):
            portable_kernel.Muon(parameters.items(), **settings)
        with pytest.raises(ValueError, match=f"{kind}:0 cannot multiply matrices in torch.float64"):
            portable_kernel.orthogonalize(parameters["wide.weight"], dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_momentum_of_float64_is_not_loaded(portable_kernel, kind):
    parameters = drawn(torch.device("cpu"), torch.float32, 0)
    saved = portable_kernel.Muon([(name, p.requires_grad_()) for name, p in parameters.items()]).state_dict()
    saved["state"][0]["momentum_buffer"] = saved["state"][0]["momentum_buffer"].double()
    with narrow_device(portable_kernel, kind) as found:
        optimizer = portable_kernel.Muon(drawn(found.device, torch.float32, 0).items())
        said = f"momentum_buffer of wide.weight is torch.float64, which {kind}:0 does not have"
        with pytest.raises(ValueError, match=said):
            optimizer.load_state_dict(saved)
