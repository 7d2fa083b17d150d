"""A variant without a compiled library passes what every variant must, also beside a compiled one in one process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.portable_variant import write_portable_variant
from tests.support.rank_pool import REPO_ID

SIDE_BY_SIDE = """
import json, sys
from pathlib import Path
import torch
from benchmarks.built_kernel import load_variant
from tests.support.small_model import named_parameters, same_bits, set_gradients


def by_torch(kernel):
    # Whether torch's functions compute what `normalize_` computes.
    X, norms = torch.ones(1, 2, 2), torch.ones(1, dtype=torch.float64)
    with torch.profiler.profile() as profile:
        kernel.kernels.native.normalize_(torch.empty(1, 2, 2), X, norms, 0.0, 1.0)
    return any(event.name == "aten::mul" for event in profile.events())


def compiled_step_moves_its_parameters(kernel):
    trained = []
    for compiled in False, True:
        parameters = named_parameters()
        optimizer = kernel.Muon(parameters.items())
        set_gradients(parameters, 0)
        step = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager") if compiled else optimizer.step
        step()
        trained.append(parameters)
    return same_bits(*trained)


kernels = [load_variant(Path(folder)) for folder in sys.argv[1:]]
steps = [compiled_step_moves_its_parameters(kernel) for kernel in kernels]
print(json.dumps([
    {"kind": k.build_info().kind, "namespace": k.kernels.native.ops.name, "portable": k.kernels.native.IS_PORTABLE,
     "by torch": by_torch(k), "step": step}
    for k, step in zip(kernels, steps)
]))
"""


@pytest.mark.slow
def test_a_variant_without_a_library_passes_what_every_variant_must(repository, portable_kernel):
    folder = Path(portable_kernel.__file__).parents[1]
    environment = {**os.environ, "LOCAL_KERNELS": f"{REPO_ID}={folder}"}
    command = [sys.executable, "-m", "pytest", "-m", "kernels_ci", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize(
    "kinds", [("compiled", "portable"), ("portable", "compiled"), ("compiled", "compiled copy")], ids=" and ".join
)
def test_two_variants_of_one_commit_run_what_each_has(repository, kernel, tmp_path, kinds):
    """A second copy of a compiled one, as a local build beside that from the Hub, shares the library of the first."""
    if kernel.kernels.native.IS_PORTABLE:
        pytest.skip("the variant under test has no compiled library")
    built = Path(kernel.__file__).parent
    folders = {
        "compiled": built,
        "compiled copy": shutil.copytree(built, tmp_path / "copy" / built.name),
        "portable": write_portable_variant(built, tmp_path, "cpu"),
    }
    command = [sys.executable, "-c", SIDE_BY_SIDE, *(str(folders[kind]) for kind in kinds)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert [variant["kind"] for variant in seen] == [kind.split()[0] for kind in kinds]
    assert seen[0]["namespace"] == seen[1]["namespace"]
    for variant in seen:
        assert variant["portable"] == variant["by torch"] == (variant["kind"] == "portable")
        assert variant["step"]
