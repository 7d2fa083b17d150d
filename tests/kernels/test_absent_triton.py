"""The package without a Triton that it can use: GPUs take torch's products, and `explain` says why."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks.built_kernel import load_variant
from tests.support.hub_clients import ROOT, run_client

# The forks do not import again what the package takes from torch, which is without Triton.
CLIENT = """
import json, sys
import torch.distributed.tensor
from tests.kernels.test_absent_triton import loaded
from tests.support.feigned_platforms import in_forks

assert "triton" not in sys.modules
print(json.dumps(in_forks(loaded, json.loads(sys.argv[1]))))
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
    "for another Python": ("x = = 1", "SyntaxError: invalid syntax (__init__.py, line 1)"),
    "with an error that names nothing": ("raise ImportError('built for another Python')", "built for another Python"),
}
# What is wrong in a file of the package, and what its error then has.
MISTAKES = {
    "from . import no_such_module": "ImportError: cannot import name 'no_such_module'",
    "import tritonish": "ModuleNotFoundError: No module named 'tritonish'",
    "no_such_name": "NameError: name 'no_such_name'",
    "x = = 1": "SyntaxError: invalid syntax (small_polar.py",
}


def loaded(variant: str, folder: str) -> list | str:
    """Return what the variant in a folder computes and chooses, with a `triton` from another one; or its error."""
    sys.path.insert(0, folder)
    try:
        kernel = load_variant(Path(variant))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    products, gpu = kernel.kernels.products, torch.device("cuda", 0)
    factor = kernel.orthogonalize(torch.eye(4, 8))
    with mock.patch.object(products, "gpu_of", lambda _: kernel.kernels.speeds.predictions.Gpu(90, 132, 50 * 2**20)):
        table = products.select_products(gpu, torch.bfloat16, 512, 512)
        small = products.small_choice(gpu, torch.bfloat16, 64, 64).gain
        return [factor.isfinite().all().item(), products.launches_triton(gpu), small, table.name, table.source]


def folder_with(folder: Path, triton: str) -> Path:
    """Return a new folder in this one, with such a `triton`."""
    module = folder / "triton"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text(triton)
    return folder


def mistaken(built: Path, folder: Path, mistake: str) -> Path:
    """Return a copy of a variant with a mistake in a file that imports Triton."""
    variant = shutil.copytree(built, folder / built.name)
    file = variant / "kernels/gpu/small_polar.py"
    file.write_text(file.read_text().replace("import triton\n", f"{mistake}\nimport triton\n", 1))
    return variant


@pytest.fixture(scope="module")
def seen(kernel, tmp_path_factory) -> dict[str, list | str]:
    """What `loaded` returns, by the name of a Triton, and of a mistake where Triton is absent."""
    built, folder = Path(kernel.__file__).parent, tmp_path_factory.mktemp("tritons")
    calls = {name: (built, folder_with(folder / str(i), text)) for i, (name, (text, _)) in enumerate(TRITONS.items())}
    for i, mistake in enumerate(MISTAKES):
        calls[mistake] = mistaken(built, folder / f"mistake {i}", mistake), calls["absent"][1]
    arguments = json.dumps([list(map(str, call)) for call in calls.values()])
    return dict(zip(calls, run_client(CLIENT, [arguments], {**os.environ, "PYTHONPATH": str(ROOT)})))


@pytest.mark.parametrize("which", TRITONS)
def test_the_package_works_and_says_why_triton_does_not(seen, which):
    *values, source = seen[which]
    assert values == [True, False, None, "torch.bmm"]
    assert source.startswith("by default, as Triton cannot launch here (") and source.endswith(f"{TRITONS[which][1]})")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_of_this_package_are_errors(seen, mistake):
    """Not taken for those of Triton, which the file imports, too."""
    assert seen[mistake].startswith(MISTAKES[mistake])


def test_the_triton_that_is_here_has_all_that_is_imported(kernel):
    """Without this, a name that Triton does not have would only make steps slower."""
    pytest.importorskip("triton")
    assert kernel.kernels.products.symmetric_product is not None
