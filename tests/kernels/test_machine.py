"""What is known of GPUs and of the software between a launch and them, by which measurements are told apart."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

GPUS = {
    "NVIDIA A": SimpleNamespace(name="NVIDIA A", major=8, minor=6, multi_processor_count=84, L2_cache_size=2**22),
    "NVIDIA B": SimpleNamespace(name="NVIDIA B", major=9, minor=0, multi_processor_count=132, L2_cache_size=2**25),
}
MODULE = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12.3.0\n"
)


@pytest.fixture
def machine(kernel, monkeypatch):
    """The module, on a machine with both GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(GPUS))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: list(GPUS.values())[number(device)])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: list(GPUS)[number(device)])
    monkeypatch.setattr(torch.version, "hip", None)
    return kernel.kernels.speeds.machine


def number(device: torch.device | int) -> int:
    return device if isinstance(device, int) else device.index


def test_a_gpu_is_described_by_its_name(machine, monkeypatch):
    """Measurements that ship are for capabilities and multiprocessors, of which AMD's have other meanings."""
    descriptions = [machine.multiprocessors(name) for name in (*GPUS, "NVIDIA C")]
    assert descriptions == [(86, 84), (90, 132), None]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert machine.multiprocessors("NVIDIA A") is None


def test_predictions_are_told_what_a_gpu_is(machine, monkeypatch):
    gpus = [machine.gpu_of(torch.device(name)) for name in ("cuda:0", "cuda:1", "cpu", "mps")]
    assert gpus == [(86, 84, 2**22), (90, 132, 2**25), None, None]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.gpu_of(torch.device("cuda:0")) is None and machine.multiprocessors("NVIDIA A") is None


def test_only_processors_and_gpus_that_are_here_have_a_key(machine, monkeypatch):
    keys = [machine.key_of(torch.device(name)) for name in ("cuda:0", "cuda:1", "mps")]
    assert keys == [machine.gpu_key("NVIDIA A"), machine.gpu_key("NVIDIA B"), None] and keys[0].threads == 0
    of_processor = machine.processor(), torch.get_num_threads(), "", torch.__version__, "", machine.kernels_digest()
    assert machine.key_of(torch.device("cpu")) == of_processor
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.key_of(torch.device("cuda:0")) is None


@pytest.mark.parametrize("is_shown", [True, False])
def test_the_key_of_a_gpu_has_all_software_between_a_launch_and_it(machine, monkeypatch, tmp_path, is_shown):
    """The driver's interface, and its module where a system shows it: containers have their own interface."""
    file = tmp_path / "version"
    if is_shown:
        file.write_text(MODULE)
    monkeypatch.setattr(machine, "_NVIDIA_DRIVER", file)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12040, raising=False)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.0"))
    driver = "550.54.15 12040" if is_shown else "12040"
    assert machine.gpu_key.__wrapped__("a GPU") == (
        "a GPU", 0, driver, torch.__version__, "3.6.0", machine.kernels_digest(),
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delitem(sys.modules, "triton")
    key = machine.gpu_key.__wrapped__("a GPU")
    assert (key.driver, key.triton) == (driver.removesuffix("12040").strip(), "")


def test_triton_needs_compute_capability_8_and_what_torch_does_not_describe_is_taken_for_able(machine, monkeypatch):
    gpus = {75: False, 80: True, 90: True}
    for capability, able in gpus.items():
        described = SimpleNamespace(capability=capability)
        monkeypatch.setattr(machine, "gpu_of", lambda device, described=described: described)
        assert machine.supports_triton(torch.device("cuda", 0)) == able
    monkeypatch.setattr(machine, "gpu_of", lambda device: None)
    assert machine.supports_triton(torch.device("cuda", 0))


TWO_PROCESSORS = "model name\t: One: a\nmodel\t\t: 17\n\nmodel name\t: Two\nmodel\t\t: 18\n"


@pytest.mark.parametrize(
    "facts, pythons, expected",
    [
        (TWO_PROCESSORS, "Python's", "One: a (model 17), torch "),
        ("model name\t: One\n", "Python's", "One, torch "),
        ("model\t\t: 17\n", "Python's", "Python's (model 17), torch "),
        (None, "Python's", "Python's, torch "),
        (None, "", "a machine, torch "),
    ],
)
def test_a_processor_is_called_what_linux_or_else_python_calls_the_first_one(
    machine, monkeypatch, tmp_path, facts, pythons, expected
):
    file = tmp_path / "cpuinfo"
    if facts is not None:
        file.write_text(facts)
    monkeypatch.setattr(machine, "_CPU_FACTS", file)
    monkeypatch.setattr(machine.platform, "processor", lambda: pythons)
    monkeypatch.setattr(machine.platform, "machine", lambda: "a machine")
    assert machine.processor.__wrapped__().startswith(expected)
