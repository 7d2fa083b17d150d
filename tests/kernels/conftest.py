"""Where a law is tried. One of a compiled operation: by the shipped ones, and by the CUDA kernels on the model of CUDA.
One of a Triton kernel: in Triton's interpreter, and on the GPU that is here.

TRITON_INTERPRET=1 must be set before Triton is imported, and in the interpreter an access out of bounds ends the
process: laws for the interpreter run together in a process of their own, those of every run in one for all files, the
others in one for each file. Each tells here what it found there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.operation_places import MODELLED_ON_DEVICE, SHIPPED, is_possible, place_of
from tests.support.rank_pool import REPO_ID, load_kernel
from tests.support.report_log import read_log
from tests.support.symmetric_products import PROVEN_SIZES
from tests.support.triton_gpu import skip_without_triton

ROOT = Path(__file__).resolve().parents[2]
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
VERDICTS = pytest.StashKey[dict[str, dict[str, str]]]()  # by what runs together


class Interpreter:
    """Operands on the CPU, where nothing may be read behind them and holes take no memory."""

    device = "cpu"
    sizes = ((48, 32), (33, 7))  # at which a proof takes seconds

    def __init__(self, folder: Path):
        self.folder = folder

    def targets(self, tuned: ModuleType) -> list:
        """Return what kernels may be compiled for."""
        return [tuned.Target("cuda", capability) for capability in (80, 90, 100, 120)] + [tuned.Target("hip", 0)]

    def guarded(self, x: Tensor) -> Tensor:
        """Return a copy that nothing follows: its file is mapped further than it goes, and to read there is fatal."""
        length = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        file = self.folder / "guarded"
        mapped = torch.from_file(str(file), True, 2 * length // x.element_size(), dtype=x.dtype)
        os.truncate(file, length)
        file.unlink()
        end = length // x.element_size()
        return mapped[end - x.numel() : end].view(x.shape).copy_(x)

    def sparse(self, elements: int) -> Tensor:
        """Return room for many elements, in a file with holes, which takes the pages that are written."""
        file = self.folder / "sparse"
        mapped = torch.from_file(str(file), True, elements, dtype=torch.float16)
        file.unlink()
        return mapped


class Gpu:
    """Operands on a GPU, where compute-sanitizer sees what is read behind them."""

    device = "cuda"
    sizes = PROVEN_SIZES

    def targets(self, tuned: ModuleType) -> list:
        major, minor = torch.cuda.get_device_capability()
        return [tuned.Target("hip", 0) if torch.version.hip else tuned.Target("cuda", 10 * major + minor)]

    def guarded(self, x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    def sparse(self, elements: int) -> Tensor:
        if torch.cuda.mem_get_info()[0] < 5 * 2 * elements:
            pytest.skip("three operands of this size do not fit into this GPU")
        return torch.empty(elements, dtype=torch.float16)


@pytest.fixture(scope="session")
def modelled_kernel(repository: Path, built_once: Callable[..., Path]) -> ModuleType:
    """The package whose operations are the CUDA kernels, run by the model of CUDA."""
    # Imported here: it builds, for which it takes the folder tools/.
    from tests.support.modelled_cuda import build_modelled_variant

    def build_model(folder: Path) -> Path:
        return build_modelled_variant(repository, folder)

    folder = built_once(build_model).parent
    with mock.patch.dict(os.environ, {"LOCAL_KERNELS": f"{REPO_ID}={folder}"}):
        return load_kernel(folder)


@pytest.fixture(scope="session")
def hopper_operations(repository: Path, built_once: Callable[..., Path]) -> None:
    """The operations of tests/hopper_model."""
    from tests.support import hopper_model  # imported here, as it builds

    def build_hopper_model(folder: Path) -> Path:
        return hopper_model.build(repository, folder)

    torch.ops.load_library(str(built_once(build_hopper_model)))


@pytest.fixture(scope="session")
def kernel(request: pytest.FixtureRequest, shipped_kernel: ModuleType) -> ModuleType:
    """The package, its operations run by what `on_every_place` names."""
    is_shipped = getattr(request, "param", SHIPPED) == SHIPPED
    return shipped_kernel if is_shipped else request.getfixturevalue("modelled_kernel")


@pytest.fixture(scope="session")
def native(kernel: ModuleType) -> ModuleType:
    """The operations of `kernel`."""
    return kernel.kernels.native


@pytest.fixture(scope="session")
def pack_(native: ModuleType) -> Callable:
    return native.momentum_pack_


@pytest.fixture(scope="session")
def descend_(native: ModuleType) -> Callable:
    return native.descend_


@pytest.fixture(scope="session")
def move_blocks_(native: ModuleType) -> Callable:
    return native.move_blocks_


@pytest.fixture(scope="session")
def tuned(kernel: ModuleType) -> ModuleType:
    """How `kernel` chooses launch configurations."""
    return kernel.kernels.gpu.tuned


@pytest.fixture(scope="session")
def both(kernel: ModuleType, portable_kernel: ModuleType) -> tuple[ModuleType, ModuleType]:
    """The compiled operations, if the kernel under test has them, and the portable ones."""
    return kernel.kernels.native, portable_kernel.kernels.native


@pytest.fixture(autouse=True)
def orders(request: pytest.FixtureRequest) -> None:
    """Let the model's blocks and threads run in an order that follows from the test's name, so that it comes again."""
    place = place_of(request.node)
    if place != SHIPPED:
        (library,) = Path(request.getfixturevalue("kernel").__file__).parent.glob("*.so")
        configure, seed = ctypes.CDLL(str(library)).cuda_model_configure, seed_of(request.node)
        configure(ctypes.c_uint64(seed), ctypes.c_bool(place == MODELLED_ON_DEVICE))
        print(f"blocks and threads run in the order of seed {seed}")


def seed_of(item: pytest.Item) -> int:
    """Return the seed of a test's random orders, which follows from its name, so that what it found comes again."""
    return zlib.crc32(item.nodeid.encode())


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Interpreter | Gpu]:
    """Each place where kernels run, its device being the one on which tensors are made."""
    site = Gpu() if request.param == "cuda" else Interpreter(tmp_path)
    skip_without_triton(request.getfixturevalue("kernel"), site.device)
    torch.set_default_device(site.device)
    with shuffled_and_poisoned(request.node) if INTERPRETING else nullcontext():
        yield site
    torch.set_default_device(None)


@contextmanager
def shuffled_and_poisoned(item: pytest.Item) -> Iterator[None]:
    """Let programs run in random order, and give memory that nobody has written NaN patterns."""
    # Only here: it takes Triton for what it is in the interpreter.
    from tests.support.triton_interpreter import repair, shuffle_programs

    repair()
    shuffle_programs(seed_of(item))
    torch.use_deterministic_algorithms(True)  # fills what torch.empty and its like return
    yield
    torch.use_deterministic_algorithms(False)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a place cannot run, and set apart what takes long there."""
    for item in items:
        if place_of(item) != SHIPPED and item.get_closest_marker("many_blocks"):
            item.add_marker(pytest.mark.slow)
        if interpreted(item) and not item.get_closest_marker("every_run"):
            item.add_marker(pytest.mark.slow)
    impossible = [item for item in items if not is_possible(item)]
    if impossible:
        config.hook.pytest_deselected(items=impossible)
        items[:] = [item for item in items if is_possible(item)]


def interpreted(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("place") == "interpreter"


def together(item: pytest.Item) -> str:
    """Return the name of the interpreter's process that runs this law; one process takes seconds to start."""
    return "every_run" if item.get_closest_marker("every_run") else item.path.stem


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tell what a law found in the interpreter's process, in place of running it in this one."""
    if INTERPRETING or not interpreted(pyfuncitem):
        return None
    session, name = pyfuncitem.session, together(pyfuncitem)
    known = session.stash.setdefault(VERDICTS, {})
    if name not in known:
        pyfuncitem._request.getfixturevalue("kernel")  # says by LOCAL_KERNELS what the process shall load
        nodes = [item.nodeid for item in session.items if interpreted(item) and together(item) == name]

        def interpret(folder: Path) -> Path:
            return run_laws(nodes, folder)

        interpret.__name__ = f"interpret_{name}"  # `built_once` tells builds apart by name
        known[name] = verdicts(pyfuncitem._request.getfixturevalue("built_once")(interpret))
    problem = known[name].get(
        pyfuncitem.nodeid, "it did not come to its end there, or a law before it ended the process"
    )
    if problem:
        pytest.fail(f"in the interpreter, by seed {seed_of(pyfuncitem)}: {problem}", pytrace=False)
    return True


def run_laws(nodes: list[str], folder: Path) -> Path:
    """Return the folder, with a log of what a process of the interpreter found, and what it printed."""
    # One thread: the products are small, and threads that wait for each other cost more than they do.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    (folder / "arguments").write_text("\n".join(["-pno:cacheprovider", f"--report-log={folder / 'log'}", *nodes]))
    command = [sys.executable, "-m", "pytest", f"@{folder / 'arguments'}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    said = f"the interpreter ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    (folder / "said").write_text(said)
    return folder


def verdicts(folder: Path) -> dict[str, str]:
    """Return what was wrong with each law that came to its end, nothing where all was right."""
    messages = {node: verdict.message for node, verdict in read_log(folder / "log").items()}
    nodes = (folder / "arguments").read_text().splitlines()[2:]
    if len(messages) < len(nodes):
        print((folder / "said").read_text())
    return messages
