"""A GPU that the build has no code for is refused by name, before anything runs on it."""

from __future__ import annotations

import itertools
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode, fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode

ARCHS = ["7.5", "8.0", "9.0", "10.0+PTX", "9.0a"]


@pytest.fixture
def gpu(kernel, monkeypatch):
    """Returns a function that sets the build's architectures and the compute capability of a GPU that is not there."""

    def gpu(archs, capability):
        metadata = {"backend": {"type": "cuda", **({"archs": archs} if archs else {})}}
        monkeypatch.setattr(kernel.kernels.capabilities, "read_metadata", lambda: metadata)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla V100")
        # Torch 2.11 begins with a real tensor on a GPU that is said to be available.
        monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda device: None)
        return torch.device("cuda", 0)

    return gpu


REFUSAL = r"cuda:0 \(Tesla V100\) has compute capability 7\.0, and this build has code for 7\.5, 8\.0, 9\.0, 10\.0\+PTX"


# Every public way to the compiled kernels, for a layer on the GPU.
ENTRIES = {
    "Muon": lambda kernel, layer: kernel.Muon(layer.named_parameters()),
    "a group that is added": lambda kernel, layer: kernel.Muon([("bias", layer.bias)]).add_param_group(
        {"params": [("weight", layer.weight)]}
    ),
    "MuonFactory": lambda kernel, layer: kernel.MuonFactory()(layer, args=None),
    "compat.Muon": lambda kernel, layer: kernel.compat.Muon(
        kernel.compat.get_default_muon_param_groups(torch.nn.Sequential(layer))
    ),
    "orthogonalize": lambda kernel, layer: kernel.orthogonalize(layer.weight.detach()),
    "compat.zeropower_via_newtonschulz5": lambda kernel, layer: kernel.compat.zeropower_via_newtonschulz5(
        layer.weight.detach(), 5
    ),
    "tune": lambda kernel, layer: kernel.tune([(64, 64)], device=layer.weight.device),
}


def layer_on(device):
    layer = torch.nn.Linear(64, 64, device="meta")
    layer.weight, layer.bias = (torch.nn.Parameter(torch.empty(p.shape, device=device)) for p in layer.parameters())
    return layer


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_gpu_without_code_is_refused_by_name(kernel, gpu, entry):
    device = gpu(ARCHS, (7, 0))
    with FakeTensorMode(), pytest.raises(ValueError, match=REFUSAL):
        ENTRIES[entry](kernel, layer_on(device))


def test_a_gpu_without_code_is_taken_for_parameters_of_adamw_alone(kernel, gpu):
    device = gpu(ARCHS, (7, 0))
    with FakeTensorMode():
        (group,) = kernel.Muon([("bias", layer_on(device).bias)]).param_groups
    assert not group["use_muon"]


class Namespaces(TorchDispatchMode):
    """Collects the namespaces of all operations that run."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.add(function.namespace)
        return function(*args, **(kwargs or {}))


OF_ADAMW = [
    {"decay_mode": "decoupled"}, {"decay_mode": "independent"}, {"decay_mode": "cautious"}, {"decay_mode": "corrected"},
    {"fallback": "nadamw"}, {"stochastic_rounding": True}, {"master_weights": "split"}, {"capturable": True},
]  # fmt: skip


@pytest.mark.parametrize("shape", [(33,), (32, 33)], ids=["AdamW", "Muon"])
@pytest.mark.parametrize("settings", OF_ADAMW, ids=str)
def test_parameters_of_adamw_alone_run_torchs_operations(kernel, settings, shape):
    """That is why a GPU without code is taken for them. A matrix runs others."""
    p = torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
    optimizer = kernel.Muon([("p", p)], **settings)
    p.grad = torch.ones_like(p)
    with Namespaces() as namespaces:
        optimizer.step()
        optimizer.metrics()
    assert "aten" in namespaces.seen
    assert (kernel.kernels.native.ops.name in namespaces.seen) == (len(shape) == 2)


@pytest.mark.parametrize(("archs", "is_there"), [(ARCHS, True), (["9.0"], False), (None, True)], ids=str)
def test_the_product_for_one_capability_is_chosen_only_where_it_is_built(kernel, gpu, monkeypatch, archs, is_there):
    """`matmul_transpose` asks for no other code of the build, so it takes every GPU."""
    device, tuned = gpu(archs, (9, 0)), kernel.kernels.gpu.tuned
    size = {"m": 64, "k": 64, **tuned.HOPPER._asdict()}
    monkeypatch.setattr(kernel.kernels.speeds.gains, "shipped_entries", lambda *asked: [size])
    built = is_there and not kernel.kernels.native.IS_PORTABLE
    assert kernel.kernels.gpu.hopper_gemm.is_built() == built
    assert tuned.launches_hopper_gemm(device, torch.float16, 2048, 2048) == built


@pytest.mark.parametrize(("archs", "capability"), [(ARCHS, (7, 5)), (ARCHS, (12, 1)), (None, (7, 0))], ids=str)
def test_a_gpu_with_code_is_taken_and_every_gpu_where_no_code_is_compiled(kernel, gpu, archs, capability):
    kernel.kernels.capabilities.check_device(gpu(archs, capability))


def test_a_cpu_is_taken_whatever_the_build_has_code_for(kernel, gpu):
    gpu(ARCHS, (7, 0))
    kernel.kernels.capabilities.check_device(torch.device("cpu"))


def test_a_gpu_that_is_not_there_is_taken(kernel, gpu, monkeypatch):
    """As fake tensors are on: nothing is ever launched there."""
    device = gpu(ARCHS, (7, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kernel.kernels.capabilities.check_device(device)


def test_code_runs_where_the_loader_says_that_it_does(kernel):
    """The loader asks for the current device alone, and only in `get_kernel`."""
    archs = pytest.importorskip("kernels.archs")
    forms = ["7.5", "8.0", "8.6", "9.0", "9.0a", "10.0f", "10.0+PTX", "9.0a+PTX", "10.0f+PTX", "gfx942", "sm_90"]
    builds = [list(build) for count in (1, 2) for build in itertools.combinations(forms, count)]
    gpus = [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (9, 1), (10, 0), (10, 3), (11, 0), (12, 1)]
    for build, capability in itertools.product(builds, gpus):
        ours = kernel.kernels.capabilities.covers(build, capability)
        assert ours == archs._supports_cuda_capability(build, capability), (build, capability)


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton")
@pytest.mark.parametrize(("capability", "kernels"), [(75, 0), (80, 3)])
def test_tritons_kernels_are_not_tried_where_triton_supports_none(kernel, capability, kernels):
    """Triton refuses no GPU older than 8.0, but says that it supports none: torch multiplies there."""
    known = kernel.kernels.speeds.predictions.Gpu(capability, 40, 4 << 20)
    device = torch.device("cuda", 0)
    with mock.patch.object(kernel.kernels.speeds.machine, "gpu_of", lambda device: known):
        assert len(kernel.tuning.contest.tasks_of(device, torch.float16, (64, 256), 1)) == kernels
        with mock.patch.object(kernel.kernels.products, "gain_of", lambda *_: kernel.kernels.speeds.gains.Gain(2.0)):
            asked = [choice(device, torch.float16, 64, 256).gain for choice in choices(kernel)]
    assert asked == ([2.0, 2.0] if kernels else [None, None])


def choices(kernel):
    return kernel.kernels.products.symmetric_choice, kernel.kernels.products.small_choice
