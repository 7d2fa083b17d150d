"""Time how long the package takes to load, each time in a new process.

    python -m benchmarks.sweep_load [--build PATH] [--rounds N] [--output FILE] [--tiny]

The rows, in seconds of the process's own time, which other work on the machine hardly changes:

- `cached get_kernel`, after `import torch, torch.distributed.tensor, torch._dynamo, kernels`: a load in a program that
  imports these anyway; waiting for the Hub does not count. The package comes from a Hub on this machine and is in the
  client's cache. The target is CACHED_TARGET seconds.
- `package`, after the same imports: the Python files and the library alone. The target is IMPORT_TARGET seconds.
- `package, without bytecode`: the same where nothing has been compiled to bytecode, as in a fresh download.
- `package, after torch alone`: with `torch.distributed.tensor`, which the package imports, and without
  `torch._dynamo`, which it leaves to the first optimizer that is made.

Rows take turns round by round; times are quartiles.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import HfApi

from benchmarks.built_kernel import find_variant, load_variant, read_metadata
from benchmarks.result_file import ResultFile, default_path, facts
from benchmarks.terminal import print_results
from benchmarks.timing import quartiles
from tools.build.commands import run
from tools.hub.client_environment import client_environment
from tools.hub.server import Hub
from tools.pins.pins_file import KERNEL

ROOT = Path(__file__).resolve().parent.parent
CACHED_TARGET, IMPORT_TARGET = 0.5, 0.1
ROUNDS, TINY_ROUNDS = 15, 1
REPO_ID = "org/optimizer"

PRELOADED = "import torch, torch.distributed.tensor, torch._dynamo, kernels"
TORCH_ALONE = "import torch, kernels"
TIMED = """
import sys, time
from pathlib import Path

start = time.process_time()
{load}
print(time.process_time() - start)
"""
GET_KERNEL = 'kernels.get_kernel("{repo_id}", version={version}, backend={backend!r})'
LOCAL = "kernels.get_local_kernel(Path(sys.argv[1]), backend={backend!r})"


class Load(NamedTuple):
    """What is imported before, the line that is timed and its target in seconds, and whether there is bytecode."""

    before: str
    line: str
    target: float | None = None
    bytecode: bool = True


def loads(version: int, backend: str) -> dict[str, Load]:
    """Return the loads by the names of their rows."""
    local = LOCAL.format(backend=backend)
    from_hub = GET_KERNEL.format(repo_id=REPO_ID, version=version, backend=backend)
    return {
        "cached get_kernel": Load(PRELOADED, from_hub, CACHED_TARGET),
        "package": Load(PRELOADED, local, IMPORT_TARGET),
        "package, without bytecode": Load(PRELOADED, local, bytecode=False),
        "package, after torch alone": Load(TORCH_ALONE, local),
    }


def publish(endpoint: str, variant: Path, version: int) -> None:
    """Put a variant on the branch of its version, as `tools.hub.publish` does, without its checks of a release."""
    api = HfApi(endpoint=endpoint)
    api.create_repo(REPO_ID, **KERNEL)
    api.create_branch(REPO_ID, branch=f"v{version}", **KERNEL)
    api.upload_folder(
        repo_id=REPO_ID, folder_path=variant, path_in_repo=f"build/{variant.name}", revision=f"v{version}", **KERNEL
    )


def seconds_of(load: Load, folder: Path, environment: Mapping[str, str]) -> float:
    """Return the seconds that a new process takes for the timed line; `folder` holds the variant's copy."""
    # The files of a download have no bytecode beside them, and where none may be written there will be none.
    more = {} if load.bytecode else {"PYTHONDONTWRITEBYTECODE": "1"}
    code = load.before + TIMED.format(load=load.line)
    where = folder / ("compiled" if load.bytecode else "downloaded")
    command = [sys.executable, "-c", code, str(where)]
    return float(run(command, environment={**environment, **more}).splitlines()[-1])


def measure(variant: Path, version: int, backend: str, rounds: int, warm: bool) -> dict[str, dict]:
    """Return the seconds of each load; if `warm`, after a run that fills caches and does not count."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hub = stack.enter_context(Hub(folder / "hub", trusted=[REPO_ID.split("/")[0]]))
        publish(hub.endpoint, variant, version)
        for kind in "compiled", "downloaded":
            shutil.copytree(variant, folder / kind / variant.name, ignore=shutil.ignore_patterns("__pycache__"))
        environment = client_environment(hub.endpoint, folder / "home")
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        rows = loads(version, backend)
        for load in rows.values() if warm else ():
            seconds_of(load, folder, environment)
        seconds = [{name: seconds_of(load, folder, environment) for name, load in rows.items()} for _ in range(rounds)]
    times = {name: list(quartiles([of_round[name] for of_round in seconds])) for name in rows}
    return {name: {"load_seconds": times[name], "target_seconds": rows[name].target} for name in rows}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time how long the package takes to load.")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="folder of variants; build/")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path, help="result file; by default in benchmarks/results, none if tiny")
    parser.add_argument("--tiny", action="store_true", help="one round, to see that it runs")
    options = parser.parse_args(arguments)
    rounds = TINY_ROUNDS if options.tiny else options.rounds
    variant = find_variant(options.build)
    kernel, metadata = load_variant(variant), read_metadata(variant)
    path = options.output or (None if options.tiny else default_path("load", torch.device("cpu")))
    version, backend = metadata["version"], metadata["backend"]["type"]
    results = ResultFile(path, facts(kernel, torch.device("cpu"), {"rounds": rounds}), list(loads(version, backend)))
    for name, row in measure(variant, version, backend, rounds, warm=not options.tiny).items():
        results.put(name, row)
    print_results(list(results.rows.values()))


if __name__ == "__main__":
    main()
