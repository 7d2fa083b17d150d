"""Stage 2: what the package promises, on this device, with every configuration that may be chosen on it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import torch

from tools.lab import optimizer_checks, product_checks, small_checks, step_checks
from tools.lab.candidates import HALVES, PRODUCT, Launch, all_launches, short
from tools.lab.fitness import refused, static_check
from tools.lab.items import Item, Lab, NotApplicableError, WrongResultError

ROOT = Path(__file__).resolve().parent.parent.parent
NO_TESTS = 5  # pytest's status where every test is deselected


def items(lab: Lab) -> Iterator[Item]:
    """Yield the items of this stage, what takes long last."""
    yield static_check(lab)
    for key, (check, arguments) in checks().items():
        yield proof(key, check, lab, *arguments)
    for launch in all_launches(lab):
        yield proof(launch.key, check_launch, lab, launch)
    for key, (check, arguments) in layout_checks(lab.tiny).items():
        yield proof(key, check, lab, *arguments)
    yield Item("pytest -m gpu", partial(run_tests, lab, "gpu", on_every_device()), 180.0)
    yield from tests_of_ranks(lab)
    for tool in ("memcheck", "racecheck"):
        yield Item(f"compute-sanitizer {tool}", partial(sanitize, lab, tool), 120.0)


def check_launch(lab: Lab, launch: Launch) -> list[str]:
    """Check a configuration, unless the static check has refused it, so that it is never launched."""
    reasons = (refused(lab) or {}).get(launch.key)
    if reasons:
        raise NotApplicableError(f"refused: {reasons[0]}")
    check = product_checks.check_configuration if launch.kernel == PRODUCT else small_checks.check_small
    return check(lab, launch.dtype, launch.config)


def checks() -> dict[str, tuple[Callable, tuple]]:
    """Return each check but those of configurations and layouts, by its key, with its arguments after the lab."""
    found = []
    for dtype in HALVES:
        found.append(("NaN", product_checks.check_nan, (dtype,)))
        found.append(("scalars", product_checks.check_scalars, (dtype,)))
        found.append(("neighbours", optimizer_checks.check_batch, (dtype,)))
        found.append(("capture", optimizer_checks.check_capture, (dtype,)))
    for dtype in (torch.float32, *HALVES):
        found.append(("training", optimizer_checks.check_training, (dtype,)))
        found.append(("exchange", step_checks.check_exchange, (dtype,)))
        found.append(("scaler", step_checks.check_scaler, (dtype,)))
        found.append(("captured step", step_checks.check_captured_step, (dtype,)))
    for arguments in (*product(HALVES, ("standard",)), (torch.float16, "gram")):
        found.append(("iteration", optimizer_checks.check_iteration, arguments))
    for dtypes in product(optimizer_checks.FLOATS, optimizer_checks.FLOATS):
        found.append(("native", optimizer_checks.check_native, dtypes))
    found.append(("compiled", optimizer_checks.check_compiled, (torch.float16,)))
    return keyed(found)


def layout_checks(tiny: bool) -> dict[str, tuple[Callable, tuple]]:
    """Return the checks of layouts, for each of which the kernels are compiled anew."""
    small = product(HALVES[: 1 if tiny else None], small_checks.LAYOUTS)
    wide = product(product_checks.DTYPES[: 1 if tiny else None], product_checks.LAYOUTS)
    found = [("small layout", small_checks.check_small_layout, arguments) for arguments in small]
    return keyed([*found, *(("layout", product_checks.check_layout, arguments) for arguments in wide)])


def keyed(checks: list[tuple[str, Callable, tuple]]) -> dict[str, tuple[Callable, tuple]]:
    def key(name: str, arguments: tuple) -> str:
        return " ".join([name, *(short(x) if isinstance(x, torch.dtype) else x for x in arguments)])

    return {key(name, arguments): (check, arguments) for name, check, arguments in checks}


def proof(key: str, check: Callable, lab: Lab, *arguments) -> Item:
    """Return an item that fails with what the check finds wrong."""

    def run() -> None:
        problems = check(lab, *arguments)
        if problems:
            raise WrongResultError("; ".join(problems))

    return Item(key, run)


def tests_of_ranks(lab: Lab) -> Iterator[Item]:
    """Yield an item for each file of tests whose ranks have a GPU each, none where there is only one."""
    if lab.tiny or torch.cuda.device_count() > 1:
        for file in files_with(r"\bon_every_backend\(")[: 1 if lab.tiny else None]:
            yield Item(f"pytest -m multi_gpu {file.stem}", partial(run_tests, lab, "multi_gpu", [file]), 300.0)


def run_tests(lab: Lab, marker: str, files: list[Path]) -> dict:
    """Run the tests in these files of the repository that have a marker, with this variant."""
    if find_spec("pytest") is None:
        raise NotApplicableError("there is no pytest")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["LOCAL_KERNELS"] = f"org/optimizer={lab.variants}"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marker, "--tb=line", *files]
    command += ["--collect-only"] if lab.tiny else []
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n")
    last = (done.stdout.strip().splitlines() or ["nothing was said"])[-1]
    if done.returncode == NO_TESTS:
        raise NotApplicableError(last)
    if done.returncode:
        failed = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        raise WrongResultError("; ".join([last, *failed])[:2000])
    return {"said": last}


def on_every_device() -> list[Path]:
    """Return the files of tests that take each device in turn."""
    return files_with(r"""usefixtures\("device"\)|^def test_\w+\([^)]*\bdevice\b""")


def files_with(pattern: str) -> list[Path]:
    """Return the files of tests in which a pattern is found."""
    found = re.compile(pattern, re.MULTILINE)
    return [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if found.search(file.read_text())]


def sanitize(lab: Lab, tool: str) -> dict:
    """Run a few small launches under one of compute-sanitizer's tools."""
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if lab.tiny or sanitizer is None:
        raise NotApplicableError("there is no GPU" if lab.tiny else "there is no compute-sanitizer")
    # An allocator that caches would hide what is read behind a tensor's end.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, "--tool", tool, "--error-exitcode", "86"]
    command += [sys.executable, "-m", "tools.lab.sanitized", str(lab.variants)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n")
    found = [line for line in done.stdout.splitlines() if line.startswith("=========") and len(line) > 10]
    if done.returncode == 86:
        raise WrongResultError("; ".join(found[:6]))
    if done.returncode:
        # Some machines do not let it look at the GPU.
        raise NotApplicableError(f"it does not work here, status {done.returncode}: {'; '.join(found[:3])}")
    return {"said": found[-1].strip("= ") if found else ""}
