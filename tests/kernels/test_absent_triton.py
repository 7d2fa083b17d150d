"""The package without a Triton that it can use: GPUs take torch's products, and `explain` says why."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Loads the variant in the first folder, with a `triton` from the second one in front of all others.
LOADS = """
import json
import sys
from pathlib import Path
from unittest import mock

import torch

from benchmarks.built_kernel import load_variant

sys.path.insert(0, sys.argv[2])
kernel = load_variant(Path(sys.argv[1]))
products, gpu = kernel.kernels.products, torch.device("cuda", 0)
factor = kernel.orthogonalize(torch.eye(4, 8))
with mock.patch.object(products, "gpu_of", lambda _: kernel.kernels.predictions.Gpu(90, 132, 50 * 2**20)):
    table = products.select_products(gpu, torch.bfloat16, 512, 512)
    chosen = products.launches_triton(gpu), products.small_choice(gpu, torch.bfloat16, 64, 64).gain, table.name
    print(json.dumps([factor.isfinite().all().item(), *chosen, table.source]))
"""
OLDER = """
import sys
from types import ModuleType

language = sys.modules["triton.language"] = ModuleType("triton.language")
language.constexpr = lambda value: value
jit = lambda *_, **__: lambda function: function
"""
TRITONS = {
    "absent": (
        "raise ModuleNotFoundError(\"No module named 'triton'\", name='triton')",
        "ModuleNotFoundError: No module named 'triton'",
    ),
    "older than tensor descriptors": (OLDER, "ModuleNotFoundError: No module named 'triton.tools'"),
    "with a library that cannot be loaded": (
        "path = '/somewhere/triton/_C/libtriton.so'\n"
        "raise ImportError(f'{path}: undefined symbol: x\\nsee above', name='triton._C.libtriton', path=path)",
        "ImportError: libtriton.so: undefined symbol: x",
    ),
    "without a package that it needs": ("import no_such_package", "No module named 'no_such_package'"),
    "with other names": (OLDER.replace("constexpr", "no_constexpr"), "has no attribute 'constexpr'"),
    "with a file that cannot be read": (
        "open('/no/such/file')",
        "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'",
    ),
    "with an error that names nothing": ("raise ImportError('built for another Python')", "built for another Python"),
}


def loaded(repository: Path, variant: Path, folder: Path, triton: str) -> subprocess.CompletedProcess:
    """Load the variant with such a Triton in a process of its own."""
    (folder / "triton").mkdir()
    (folder / "triton" / "__init__.py").write_text(triton)
    command = [sys.executable, "-c", LOADS, str(variant), str(folder)]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True)


@pytest.mark.parametrize("which", TRITONS)
def test_the_package_works_and_says_why_triton_does_not(repository, kernel, tmp_path, which):
    triton, why = TRITONS[which]
    done = loaded(repository, Path(kernel.__file__).parent, tmp_path, triton)
    assert done.returncode == 0, done.stderr[-4000:]
    *seen, source = json.loads(done.stdout.splitlines()[-1])
    assert seen == [True, False, None, "torch.bmm"]
    assert source.startswith("by default, as Triton cannot launch here (") and source.endswith(f"{why})")


@pytest.mark.parametrize("mistake", ["from . import no_such_module", "import tritonish", "no_such_name"])
def test_mistakes_of_this_package_are_errors(repository, kernel, tmp_path, mistake):
    """Not taken for those of Triton, which the file imports, too."""
    built = Path(kernel.__file__).parent
    variant = shutil.copytree(built, tmp_path / built.name)
    file = variant / "kernels" / "small_polar.py"
    file.write_text(file.read_text().replace("import triton\n", f"{mistake}\nimport triton\n", 1))
    done = loaded(repository, variant, tmp_path, TRITONS["absent"][0])
    assert done.returncode == 1 and mistake.split()[-1] in done.stderr.splitlines()[-1]


def test_the_triton_that_is_here_has_all_that_is_imported(kernel):
    """Without this, a name that Triton does not have would only make steps slower."""
    pytest.importorskip("triton")
    assert kernel.kernels.products.symmetric_product is not None
