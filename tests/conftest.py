"""What tests share: the repository, its variant for this torch, built once and loaded as users load it, and a toy."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest
import torch

from gloo_pool import Pools
from toy_kernel import write_toy_kernel

try:
    import kernels
except ModuleNotFoundError:  # a machine with a GPU and without a network: LOCAL_KERNELS says what to load there
    kernels = None

ROOT = Path(__file__).resolve().parent.parent
REPO_ID = "org/optimizer"
LEFT_OUT = pytest.StashKey[int]()
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

# These build or publish, which takes the Hub's own package.
NEED_HUB = (
    "abi_check", "benchmarks", "build", "client_environment", "cuda_variant", "demo", "gpu_lab", "hub", "hub_files",
    "hub_requests", "hub_store", "instruction_sets", "lint_kernels", "native_backend", "publish",
    "sweeps", "two_revisions", "verify",
)  # fmt: skip
# The Hub's builder runs tests without the folder tools/.
NEED_TOOLS = (*NEED_HUB, "gpu_checks", "lab_checks", "numerics_document", "report")
_missing = NEED_TOOLS if not (ROOT / "tools").is_dir() else () if kernels else NEED_HUB
collect_ignore = [f"test_{name}.py" for name in _missing]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU where there is none; `pytest_terminal_summary` says so."""
    if not torch.cuda.is_available():
        left_out = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=left_out)
        config.stash[LEFT_OUT] = len(left_out)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"{config.stash[LEFT_OUT]} tests need a GPU, which is not here: `make gpu-lab`")


@pytest.fixture(scope="session")
def repository() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def native_backend() -> str:
    """The backend whose variant is tested; the loader is asked for it by name."""
    # Imported here, as in `variant`: without tools/ there is a kernel all the same.
    from native_backend import native_backend

    return native_backend()


@pytest.fixture(scope="session")
def variant(repository: Path, native_backend: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from build import build_variants

    (built,) = build_variants(repository, [native_backend], tmp_path_factory.mktemp("build"))
    return built.path


@pytest.fixture(scope="session")
def kernel(request: pytest.FixtureRequest):
    """The package as `get_kernel` returns it; where a builder has set LOCAL_KERNELS, the build that it names."""
    backend = None
    if kernels is None:
        from built_kernel import find_variant, load_variant

        return load_variant(find_variant(Path(local_kernels()[REPO_ID])))
    if REPO_ID not in local_kernels():
        backend = request.getfixturevalue("native_backend")
        os.environ["LOCAL_KERNELS"] = f"{REPO_ID}={request.getfixturevalue('variant').parent}"
    return kernels.get_kernel(REPO_ID, version=1, backend=backend, trust_remote_code=True)


@pytest.fixture(scope="session")
def pools(kernel):
    """Pools of processes that load the same build, by world size, `pools(4)`; started when first asked for."""
    with contextlib.closing(Pools(kernel)) as found:
        yield found


def local_kernels() -> dict[str, str]:
    """Repositories that LOCAL_KERNELS, `<repository>=<folder>:...`, names, and their folders."""
    entries = os.environ.get("LOCAL_KERNELS", "").split(":")
    return {repository: folder for repository, sign, folder in (entry.partition("=") for entry in entries) if sign}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest):
    """Each device that is there, as the one on which tensors are made."""
    torch.set_default_device(request.param)
    yield request.param
    torch.set_default_device(None)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return write_toy_kernel(tmp_path / "toy")
