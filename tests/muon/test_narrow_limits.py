"""What is decided otherwise without a library or without float64, and what such a device and its model refuse."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.muon.test_narrow_device import drawn
from tests.support.inside import plan_of
from tests.support.narrow_device import KINDS, narrow_device

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_refuses_what_the_device_lacks(portable_kernel, kind):
    with narrow_device(portable_kernel, kind) as narrow:
        x, number = torch.ones(3).to(narrow.device), torch.tensor(2.0, dtype=torch.float64)
        for make in (lambda: x.double(), lambda: torch.zeros(1, dtype=torch.float64, device=narrow.device)):
            with pytest.raises(RuntimeError, match=f"{kind}:0 has no torch.float64"):
                make()
        with pytest.raises(RuntimeError, match="has no"):
            x.sum() * number  # two tensors without a dimension have the wider dtype
        with pytest.raises(RuntimeError, match=r"operands on .* and on the CPU"):
            x + torch.ones(3)
        assert (x * number).cpu().tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_iteration_is_in_float32_and_said_to_be(portable_kernel, kind):
    with narrow_device(portable_kernel, kind) as narrow:
        optimizer = portable_kernel.Muon(drawn(narrow.device, torch.bfloat16, 0).items())
        kernels = [row.kernel for row in optimizer.explain() if row.branch == "muon"]
    assert len(kernels) == 4 and all("torch.bmm float32" in each for each in kernels)


@pytest.mark.parametrize("has_float64", [False, True])
def test_lines_whose_squares_float32_cannot_hold_become_zeros(portable_kernel, has_float64):
    """Their second moments are infinite. Lines of another matrix, which are alike, keep what they have."""
    with narrow_device(portable_kernel, "xpu", has_float64=has_float64) as narrow:
        updates = torch.ones(2, 6, 8).mul_(torch.tensor([1e20, 1.0]).view(2, 1, 1)).to(narrow.device)
        portable_kernel.rules.second_moment.balance_(updates, torch.zeros(2, 6, 1).to(narrow.device), 0.95)
        large, other = updates.cpu()
    assert not large.any()
    torch.testing.assert_close(other, torch.ones(6, 8), rtol=1e-6, atol=0)


@pytest.mark.parametrize("has_float64", [False, True])
def test_norms_of_updates_take_one_operation_a_batch(portable_kernel, monkeypatch, has_float64):
    """Torch's functions would write them in the descent in dozens of launches, with or without float64."""
    step, counts = portable_kernel.step.finish, []
    with narrow_device(portable_kernel, "xpu", has_float64) as narrow:
        for norms in step.norms_of_updates, lambda updates: updates[:, 0, 0]:
            monkeypatch.setattr(step, "norms_of_updates", norms)
            parameters = drawn(narrow.device, torch.float32, 0)
            optimizer = portable_kernel.Muon(parameters.items())
            for name, gradient in drawn(narrow.device, torch.float32, 1).items():
                parameters[name].grad = gradient
            narrow.operations.clear()
            optimizer.step()
            counts.append(narrow.operations)
            narrow.operations = Counter()
    taken, left_out = counts
    assert taken - left_out == {"linalg_vector_norm": len(plan_of(optimizer).batches)}


@pytest.mark.parametrize("method", ["gram", "gram_float32"])
def test_ranks_sum_no_squared_norms_in_float32(kernel, method):
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    of = torch.float32, (64, 512), schedule, method
    assert kernel.iteration.summed_iteration(torch.device("mps"), *of) is None
    assert kernel.iteration.summed_iteration(torch.device("cpu"), *of).method == method
    assert (
        kernel.iteration.summed_iteration(torch.device("cpu"), torch.float64, *of[1:]) is None
    )  # it would lose digits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", ["ns_dtype", "momentum_dtype"])
def test_float64_is_refused_by_name(portable_kernel, kind, key):
    """Before there is an optimizer, and before a step that a group was changed for."""
    said = f"{key} of wide.weight is torch.float64, which {kind}:0 does not have"
    with narrow_device(portable_kernel, kind) as narrow:
        parameters = drawn(narrow.device, torch.float32, 0)
        with pytest.raises(ValueError, match=said):
            portable_kernel.Muon(parameters.items(), **{key: "float64"})
        optimizer = portable_kernel.Muon(parameters.items())
        for name, gradient in drawn(narrow.device, torch.float32, 1).items():
            parameters[name].grad = gradient
        optimizer.param_groups[0][key] = "float64"
        with pytest.raises(ValueError, match=said):
            optimizer.step()
        before = drawn(torch.device("cpu"), torch.float32, 0)
        assert all(torch.equal(p.cpu(), before[name]) for name, p in parameters.items())


@pytest.mark.parametrize("kind", KINDS)
def test_float64_is_no_work_dtype_there(portable_kernel, kind):
    with narrow_device(portable_kernel, kind) as narrow:
        G = torch.ones(4, 8).to(narrow.device)
        with pytest.raises(ValueError, match=f"{kind}:0 cannot multiply matrices in torch.float64"):
            portable_kernel.orthogonalize(G, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", ["device", "cpu"])
def test_gradients_of_two_devices_have_one_norm(portable_kernel, monkeypatch, kind, first):
    """torch takes norms one by one where the devices differ; the model refuses such a list."""
    monkeypatch.setattr(torch, "_foreach_norm", lambda tensors, *_: [tensor.norm() for tensor in tensors])
    with narrow_device(portable_kernel, kind) as narrow:
        gradients = [torch.full((3,), 2.0).to(narrow.device), torch.full((4,), 1.0, dtype=torch.float64)]
        norm = portable_kernel.step.metrics._norm(gradients if first == "device" else gradients[::-1], None)
        assert norm.item() == 4.0


@pytest.mark.parametrize("kind", KINDS)
def test_momentum_of_float64_is_not_loaded(portable_kernel, kind):
    parameters = drawn(torch.device("cpu"), torch.float32, 0)
    saved = portable_kernel.Muon([(name, p.requires_grad_()) for name, p in parameters.items()]).state_dict()
    saved["state"][0]["momentum_buffer"] = saved["state"][0]["momentum_buffer"].double()
    with narrow_device(portable_kernel, kind) as narrow:
        optimizer = portable_kernel.Muon(drawn(narrow.device, torch.float32, 0).items())
        said = f"momentum_buffer of wide.weight is torch.float64, which {kind}:0 does not have"
        with pytest.raises(ValueError, match=said):
            optimizer.load_state_dict(saved)
