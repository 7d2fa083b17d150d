"""Runs tests for GPUs on a feigned one.

    python -m tools.feigned_gpu [--portable] [arguments of pytest]

The first run installs torch for CUDA into `out/feigned_gpu`, 530 MB from the registry, and builds the package's variant
for CUDA. With `--portable` the tests get the one without a compiled library, which serves CUDA 12. It needs Linux on
x86-64 and nvcc.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.build.commands import BuildError, run
from tools.build.compilers import find_cuda
from tools.build.variants import NOARCH, build_variants
from tools.lab.variant import overlay

from . import libraries

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "out/feigned_gpu"
# The oldest torch for which the variant is built, and its triton. NVIDIA's libraries, which they need, are feigned.
TORCH = ["torch==2.11.0", "triton==3.6.0"]
NEEDED = ["filelock", "typing_extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools<82"]
# What a feigned GPU does not compute: kernels of tests and of torch.compile, what a kernel leaves in scratch, sparse
# tensors, products in half precision with a single rounding, and the one NaN that a GPU's arithmetic has: a CPU's takes
# the bits of an operand's.
BEYOND = [
    "tests/kernels/test_tiles.py",
    "tests/kernels/test_sanitizer.py",
    "tests/kernels/test_small_polar_batches.py::test_the_longest_matrices_have_their_scratch_behind_each_other",
    "tests/kernels/test_small_polar_laws.py::test_each_matrix_has_a_part_of_the_scratch_to_itself",
    "tests/muon/test_device.py::test_a_compiled_orthogonalization_errs_at_most_twice_as_much",
    "tests/math/test_accuracy.py::test_error_is_at_most_twice_that_of_torchs_products",
    "tests/math/test_accuracy.py::test_error_is_within_the_bound_of_its_roundings[polar_express-float16-standard-cuda]",
    "tests/muon/test_broken_off.py::test_what_is_found_out_before_anything_moves_leaves_no_mark",
    "tests/ranks/test_second_moment.py::test_zeros_and_a_nan_stay_where_they_are",
]
FOLDERS = ["tests/kernels", "tests/math", "tests/muon", "tests/ranks", "tests/rules", "tests/tuning"]
# As many as the ranks of any test: each has a GPU of its own.
GPUS = 8
BESIDE_EACH_OTHER = ["--numprocesses", "auto", "--maxprocesses", "4", "--dist", "loadfile"]
DEFAULT = [
    "-m",
    "(gpu or multi_gpu) and not slow",
    *FOLDERS,
    *BESIDE_EACH_OTHER,
    *(f"--deselect={test}" for test in BEYOND),
]


def environment() -> Path:
    """Return the Python that has torch for CUDA."""
    python = OUT / "environment/bin/python"
    ready, lists = OUT / "ready", [ROOT / f"requirements/{name}.txt" for name in ("develop", "gpu")]
    if not ready.exists() or ready.stat().st_mtime < max(path.stat().st_mtime for path in (*lists, Path(__file__))):
        shutil.rmtree(OUT / "environment", ignore_errors=True)
        run([sys.executable, "-m", "venv", OUT / "environment"])
        install = [python, "-m", "pip", "install", "--quiet"]
        run([*install, "--no-deps", *TORCH])
        lines = (ROOT / "requirements/develop.txt").read_text().splitlines()
        clients = [line for line in lines if line.startswith(("kernels==", "huggingface_hub=="))]
        run([*install, *NEEDED, *clients, "--requirement", ROOT / "requirements/gpu.txt"])
        ready.touch()
    return python


def portable_variants() -> Path:
    """Return the folder with the variants without a compiled library."""
    build_variants(ROOT, [NOARCH], OUT / "portable")
    return OUT / "portable"


def compiled_variant() -> Path:
    """Return the folder with the variant for CUDA, which is compiled anew only if its sources in C++ have changed."""
    build = OUT / "build"
    folders = [ROOT / "torch-ext", *ROOT.glob("optimizer_*")]
    sources = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".cpp", ".cu", ".cuh", ".h")]
    made = list(build.glob("torch-*/*.so"))
    if not made or made[0].stat().st_mtime < max(path.stat().st_mtime for path in sources):
        build_variants(ROOT, ["cuda"], build)
    else:
        overlay(made[0].parent)
    return build


def prepared(portable: bool) -> tuple[Path, dict[str, str]]:
    """Return the Python of the feigned GPU and its variables; `BuildError` says what this machine lacks."""
    headers = find_cuda().home / "include"  # first: without nvcc nothing has to be installed
    python = environment()
    (torch_libraries,) = (OUT / "environment").glob("lib/python3*/site-packages/torch/lib")
    libraries.build(torch_libraries, headers, OUT / "libraries")
    site = OUT / "site/sitecustomize.py"  # which Python imports when it starts
    site.parent.mkdir(exist_ok=True)
    site.write_text("import tools.feigned_gpu.plugin\n")
    variables = {
        "FEIGNED_GPUS": GPUS,
        "LD_LIBRARY_PATH": OUT / "libraries",
        "FEIGNED_GPU_LIBRARIES": OUT / "libraries",
        "PYTHONPATH": f"{site.parent}:{ROOT}",
        "LOCAL_KERNELS": f"org/optimizer={portable_variants() if portable else compiled_variant()}",
    }
    return python, {name: str(value) for name, value in variables.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.feigned_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--portable", action="store_true", help="test the variant without a compiled library")
    options, arguments = parser.parse_known_args()  # the rest is for pytest
    try:
        python, variables = prepared(options.portable)
    except BuildError as error:
        print(f"tools.feigned_gpu: {error}", file=sys.stderr)
        return 1
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *(arguments or DEFAULT)]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}).returncode


if __name__ == "__main__":
    sys.exit(main())
