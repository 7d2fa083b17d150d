"""What is built here loads on other processors, trains, and computes the same bits: QEMU emulates them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tools.build.commands import BuildError
from tools.build.compilers import find_cuda
from tools.build.loading import libraries_of_cuda
from tools.build.machines import find_machine
from tools.build.variants import build_variants
from tools.emulation.compare import differences
from tools.emulation.processors import ARM, X86, Processor, emulated, here

pytestmark = pytest.mark.slow


def present(name: str) -> Processor:
    """Return an emulated processor, or skip the test and say what is missing."""
    try:
        return emulated(name)
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def build(repository, tmp_path_factory) -> Path:
    """A folder with the variant for CPUs of this machine."""
    (built,) = build_variants(repository, ["cpu"], tmp_path_factory.mktemp("processors"))
    return built.path.parent


@pytest.fixture(scope="module")
def of_this_processor(build) -> dict:
    return here().fingerprint(build)


def with_cuda(processor: Processor, folder: Path) -> Processor:
    """Return `processor` with the libraries that a CUDA variant needs there and a torch for CPUs does not load."""
    libraries = libraries_of_cuda(find_cuda(), find_machine(processor.name), folder)
    emulator, *python = processor.python
    return replace(processor, python=(emulator, "-E", f"LD_PRELOAD={':'.join(map(str, libraries))}", *python))


def assert_agrees(fingerprint: dict, expected: dict) -> None:
    """Bits are equal. Losses differ by torch's products: by at most 3e-5 of an update a step, so 6e-4 in 20 steps.

    3e-5 is a rounding of float32, 6e-8, times the largest gain of the coefficients, 493.
    """
    assert differences(fingerprint, expected) == set()
    assert fingerprint["losses"][-1] < 0.7 * fingerprint["losses"][0]
    assert fingerprint["losses"] == pytest.approx(expected["losses"], rel=6e-4)


@pytest.mark.parametrize("name", X86)
def test_every_level_of_x86_computes_the_same_bits(build, of_this_processor, name):
    fingerprint = present(name).fingerprint(build)
    in_float32 = "avx2" if name == "Haswell" else "portable"
    assert (fingerprint["machine"], fingerprint["instructions"]) == ("x86_64", f"portable, {in_float32}")
    assert any(name.startswith(f"gemm_ in float32, {in_float32}") for name in fingerprint["bits"])
    assert_agrees(fingerprint, of_this_processor)


def test_aarch64_computes_the_same_bits(build, of_this_processor, repository):
    """The Hub's loader takes the variant of the cross compiler there, which lies beside the one for x86-64."""
    processor = present(ARM)
    try:
        find_machine(ARM).torch_version  # noqa: B018
    except BuildError as error:
        pytest.skip(str(error))
    (built,) = build_variants(repository, ["cpu"], build, ARM)
    fingerprint = processor.fingerprint(build)
    assert (fingerprint["machine"], fingerprint["variant"]) == (ARM, built.path.name)
    assert_agrees(fingerprint, of_this_processor)


def test_the_cuda_variant_for_aarch64_computes_the_same_bits_on_the_cpu(
    of_this_processor, other_cuda_variant, tmp_path
):
    """What runs on its GPU is compared in test_cuda_variant.py. This torch for aarch64 is Debian's, for CPUs alone."""
    fingerprint = with_cuda(present(ARM), tmp_path).fingerprint(other_cuda_variant)
    assert (fingerprint["machine"], fingerprint["variant"]) == (ARM, other_cuda_variant.name)
    assert_agrees(fingerprint, of_this_processor)
