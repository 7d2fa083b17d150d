"""What tests share: the repository, its variant for this torch, built once and loaded as users load it, and a toy."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from filelock import FileLock

from tests.support.portable_variant import write_portable_variant
from tests.support.rank_pool import DEVICES, REPO_ID, Pools, load_kernel, local_kernels
from tests.support.toy_kernel import write_toy_kernel

try:
    import kernels
except ModuleNotFoundError:  # a machine with a GPU and without a network: LOCAL_KERNELS says what to load there
    kernels = None

# Choices are read from the user's caches, and tests measure: they have caches of their own. Set before others read it.
CACHES = tempfile.TemporaryDirectory(prefix="optimizer-tests-")
os.environ["XDG_CACHE_HOME"] = CACHES.name

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = pytest.StashKey[Counter[int]]()

# Here and not in pytest.ini, which stays behind where the Hub's builder runs the tests.
MARKERS = (
    "kernels_ci: the subset that the Hub's builder runs, under 60 seconds",
    "slow: needs more than ten seconds",
    "every_run: a law of a Triton kernel that is tried in Triton's interpreter in every run; others are slow there",
    "many_blocks: needs more than a second on the model of CUDA, where it is slow",
    "integrations: needs what requirements/integrations.txt names (make test-integrations)",
    "stacks: installs other torches and Tritons from the registry",
    "builder: needs a checkout of the Hub's builder (make test-builder)",
    "gpu: needs a CUDA device",
    "multi_gpu(ranks): needs a CUDA device for each of the ranks",
)
# The Hub's builder runs the tests in a copy without the folder tools/.
IN_BUILDER = not (ROOT / "tools").is_dir()
# These build, publish or draw, or train in other libraries. That takes the Hub's own package and others, and tools/.
NEED_HUB = ("benchmarks", "delivery", "examples", "integrations", "lab", "reports")
collect_ignore = [] if kernels and not IN_BUILDER else list(NEED_HUB)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--checkout", type=Path, help="a checkout of huggingface/kernels, for the tests marked `builder`")


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out files of which the Hub's builder runs no test: they may import what it does not copy."""
    is_test = collection_path.match("test_*.py")
    return True if IN_BUILDER and is_test and b"kernels_ci" not in collection_path.read_bytes() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs more GPUs than there are; `pytest_terminal_summary` says so."""
    here = torch.cuda.device_count()
    left_out = [item for item in items if gpus_needed(item) > here]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        config.stash[LEFT_OUT] = Counter(map(gpus_needed, left_out))
        items[:] = [item for item in items if gpus_needed(item) <= here]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send what was left out to the process that writes the summary, where this one runs tests for it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash.get(LEFT_OUT, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """Take that; every process leaves out the same, and one that has died tells nothing."""
    if hasattr(node, "workeroutput"):
        node.config.stash[LEFT_OUT] = Counter(node.workeroutput["left_out"])


def gpus_needed(item: pytest.Item) -> int:
    """Return how many GPUs a test needs by its markers."""
    several = item.get_closest_marker("multi_gpu")
    return several.args[0] if several else int(item.get_closest_marker("gpu") is not None)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    for gpus, count in sorted(config.stash.get(LEFT_OUT, {}).items()):
        needed = "a GPU, which is not here" if gpus == 1 else f"{gpus} GPUs; here are {torch.cuda.device_count()}"
        terminalreporter.write_line(f"{count} tests need {needed}: `make gpu-lab`")


@pytest.fixture(scope="session")
def repository() -> Path:
    return ROOT


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch with one thread, for products so small that they would only wait for a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Give torch back the threads that it had before a test: what is measured on a CPU holds for their number."""
    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:  # setting a number, even the same one, would cost each test
        torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def native_backend() -> str:
    """The backend whose variant is tested; the loader is asked for it by name."""
    # Imported here, as in `variant`: without tools/ there is a kernel all the same.
    from tools.build.native_backend import native_backend

    return native_backend()


@pytest.fixture(scope="session")
def loaded_by_default(native_backend: str) -> None:
    """Skip a test whose users do not name a backend, where only by its name this torch loads what is tested."""
    if torch.version.cuda and native_backend == "cpu":
        pytest.skip(f"a torch for CUDA {torch.version.cuda} loads a CUDA variant, for which there is no nvcc here")


@pytest.fixture(scope="session")
def built_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`built_once(build)` returns what `build(folder)` returned to the first process of a run that called a function of
    that name; others wait for it. A process that runs tests beside others has its folder in one that is theirs, too.
    """
    folder = tmp_path_factory.getbasetemp()
    common = folder.parent if hasattr(request.config, "workerinput") else folder

    def built_once(build: Callable[[Path], Path]) -> Path:
        result = common / f"{build.__name__}.result"
        with FileLock(f"{result}.lock"):
            if not result.exists():
                result.write_text(str(build(Path(tempfile.mkdtemp(dir=common)))))
        return Path(result.read_text())

    return built_once


@pytest.fixture(scope="session")
def variant(repository: Path, native_backend: str, built_once: Callable[..., Path]) -> Path:
    from tools.build.variants import build_variants

    def build_shipped_variant(folder: Path) -> Path:
        (built,) = build_variants(repository, [native_backend], folder)
        return built.path

    return built_once(build_shipped_variant)


@pytest.fixture(scope="session")
def shipped_kernel(request: pytest.FixtureRequest) -> ModuleType:
    """The package as `get_kernel` returns it: where a builder has set LOCAL_KERNELS, from the folder that it names."""
    if kernels is None or REPO_ID in local_kernels():
        return load_kernel(Path(local_kernels()[REPO_ID]))
    folder = request.getfixturevalue("variant").parent
    os.environ["LOCAL_KERNELS"] = f"{REPO_ID}={folder}"  # for other processes, and for `get_kernel`
    return load_kernel(folder)


@pytest.fixture(scope="session")
def kernel(shipped_kernel: ModuleType) -> ModuleType:
    """The package that a test calls; a folder may put another build in its place."""
    return shipped_kernel


# Of the shipped one, which stays the same for a session: a second with the same id would get the first one's modules.
@pytest.fixture(scope="session")
def portable_kernel(shipped_kernel: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The package as a variant without a library: the one under test, or one beside it in this process."""
    if shipped_kernel.kernels.native.IS_PORTABLE:
        return shipped_kernel
    folder = tmp_path_factory.mktemp("portable")
    backend = "cuda" if torch.version.cuda else "cpu"
    write_portable_variant(Path(shipped_kernel.__file__).parent, folder, backend)
    with mock.patch.dict(os.environ, {"LOCAL_KERNELS": f"{REPO_ID}={folder}"}):
        return load_kernel(folder)


@pytest.fixture
def measurements(kernel, monkeypatch, tmp_path):
    """The store of measurements, with a cache folder of its own and nothing known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel.kernels.speeds.measurements.forget()
    yield kernel.kernels.speeds.measurements
    monkeypatch.undo()
    kernel.kernels.speeds.measurements.forget()


@pytest.fixture(scope="session")
def pools_by_backend(kernel):
    with contextlib.ExitStack() as stack:
        yield {backend: stack.enter_context(contextlib.closing(Pools(kernel, backend))) for backend in DEVICES}


@pytest.fixture(scope="session")
def pools(request: pytest.FixtureRequest, pools_by_backend) -> Pools:
    """Pools of processes that load the same build, by world size, `pools(4)`; started when first asked for.

    They talk over gloo; `on_every_backend` makes that a parameter of a test.
    """
    return pools_by_backend[getattr(request, "param", "gloo")]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest):
    """Each device that is there, as the one on which tensors are made."""
    torch.set_default_device(request.param)
    yield request.param
    torch.set_default_device(None)


@pytest.fixture
def imported_toy(tmp_path: Path) -> Path:
    """A repository with a toy kernel, whose builds are imported, as every build is: that takes seconds."""
    return write_toy_kernel(tmp_path / "toy")


@pytest.fixture
def toy(imported_toy: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a toy kernel, whose builds are not imported."""
    monkeypatch.setattr("tools.build.variants.load", lambda variant, job: "nothing")
    return imported_toy
