"""The float32 product's code for AVX-512, run where there is none; tests/gemm_vectors compiles it for AVX2."""

from __future__ import annotations

import platform

import pytest
import torch

from tools.build.commands import run
from tools.build.machines import TORCH

HAS_AVX2 = platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


@pytest.mark.skipif(not HAS_AVX2, reason="this processor has no AVX2")
def test_vectors_of_sixteen_give_the_bits_of_vectors_of_eight(repository, tmp_path):
    """Only GCC's instructions for AVX-512 are left to a processor that has them: `test_native_gemm` compares there."""
    folders = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
    options = ["-std=c++20", "-O3", "-Wno-psabi", "-DTORCH_TARGET_VERSION=0x20b000000000000", *folders]
    program = tmp_path / "gemm_vectors"
    run(["g++", *options, repository / "tests/gemm_vectors/main.cpp", "-o", program])
    assert run([program]).split() == ["0"]
