"""Which variant is built and asked for follows from torch and from the nvcc that is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.build import compilers, native_backend
from tools.build.commands import BuildError
from tools.build.compilers import Cuda
from tools.feigned_gpu import __main__ as feigned_gpu


@pytest.mark.parametrize(
    ("torchs", "toolkit", "backend"),
    [
        (None, "13.0", "cpu"),
        (None, None, "cpu"),
        ("13.0", None, "cpu"),
        ("13.0", "13.0", "cuda"),
        ("13.2", "13.0", "cuda"),
        ("13.0", "13.2", "cpu"),
        ("12.8", "13.0", "cpu"),
    ],
)
def test_cuda_is_chosen_only_if_nvcc_is_no_newer_than_torch(torchs, toolkit, backend, monkeypatch):
    def find_cuda() -> Cuda:
        if toolkit is None:
            raise BuildError("there is no nvcc")
        return Cuda("nvcc", Path("/cuda"), toolkit)

    monkeypatch.setattr(native_backend.torch.version, "cuda", torchs)
    monkeypatch.setattr(native_backend, "find_cuda", find_cuda)
    assert native_backend.native_backend() == backend


def test_nvcc_is_found_where_the_installer_puts_it(tmp_path, monkeypatch):
    """One on the PATH is taken before it."""
    installed, chosen = tmp_path / "cuda/bin", tmp_path / "chosen"
    monkeypatch.setattr(compilers, "NVCC_FOLDER", str(installed))
    monkeypatch.setenv("PATH", str(chosen))
    assert compilers.find_nvcc() is None
    for folder in installed, chosen:
        folder.mkdir(parents=True)
        (folder / "nvcc").touch(0o755)
        assert compilers.find_nvcc() == str(folder / "nvcc")


def test_without_nvcc_nothing_is_installed_for_a_feigned_gpu(monkeypatch, capsys):
    """Torch for CUDA is 530 MB, and of no use without the variant for it."""
    monkeypatch.setattr(compilers, "find_nvcc", lambda: None)
    monkeypatch.setattr(feigned_gpu, "environment", lambda: pytest.fail("it installs torch"))
    monkeypatch.setattr("sys.argv", ["feigned_gpu", "-k", "nothing"])
    assert feigned_gpu.main() == 1
    assert capsys.readouterr().err.startswith("tools.feigned_gpu: there is no nvcc; install the CUDA 13 toolkit")
