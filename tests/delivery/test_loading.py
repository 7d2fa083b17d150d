"""A variant that cannot be imported is not put in place."""

from __future__ import annotations

import pytest
import torch

from tools.build import compilers, machines, variants
from tools.build.commands import BuildError

needs_nvcc = pytest.mark.skipif(compilers.find_nvcc() is None, reason="there is no nvcc")
FAULTS = {
    "package": ("torch-ext/toy/__init__.py", "import no_such_module\n", "No module named 'no_such_module'"),
    "library": ("toy_cpu/toy.cpp", "#include <cstdlib>\nint now = (abort(), 0);\n", "status -6"),
}


@pytest.mark.parametrize(("file", "text", "complaint"), FAULTS.values(), ids=FAULTS)
def test_variant_that_fails_when_it_is_imported_is_refused(imported_toy, tmp_path, file, text, complaint):
    """Compilers and checks of symbols see nothing of it; what was built before stays."""
    (before,) = variants.build_variants(imported_toy, ["cpu"], tmp_path / "out")
    with (imported_toy / file).open("a") as source:
        source.write(text)
    with pytest.raises(BuildError, match=f"(?s)was built and cannot be imported: .*{complaint}"):
        variants.build_variants(imported_toy, ["cpu"], tmp_path / "out")
    assert (before.path / f"{before.ops}.abi3.so").exists()


@pytest.mark.parametrize("backend", ["cpu", "noarch"])
def test_importing_leaves_no_file_in_the_variant(imported_toy, tmp_path, monkeypatch, backend):
    """Its digest would not know the bytecode. What the user's LOCAL_KERNELS says is of other variants.

    Of those without a library one is built, from which the others differ in names.
    """
    monkeypatch.setattr(variants, "NOARCH_BACKENDS", ("rocm",))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("LOCAL_KERNELS", "no entry")
    (built,) = variants.build_variants(imported_toy, [backend], tmp_path / "out")
    assert built.loaded == f"torch {torch.__version__}"
    assert not list(built.path.rglob("__pycache__"))


@needs_nvcc
def test_cuda_variant_is_imported_by_a_torch_without_cuda(imported_toy, tmp_path):
    """It gets stubs of what only a CUDA build of torch has, and needs them: this asks for the current stream."""
    with (imported_toy / "toy_cuda/toy.cu").open("a") as source:
        source.write('extern "C" int aoti_torch_get_current_cuda_stream(int, void**);\n')
        source.write("int use() { return aoti_torch_get_current_cuda_stream(0, nullptr); }\n")
    (built,) = variants.build_variants(imported_toy, ["cuda"], tmp_path / "a folder")
    has_cuda = (machines.TORCH / "lib/libtorch_cuda.so").exists()
    assert built.loaded.endswith(" with stubs of CUDA's") != has_cuda
