"""What the sweeps share: their options, their results file, and the loop over their cases."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import torch

from benchmarks import peers
from benchmarks.built_kernel import load_built
from benchmarks.result_file import ResultFile, default_path, facts
from benchmarks.timing import Deadline

ROOT = Path(__file__).resolve().parent.parent

# The side of the dense product whose rate represents what the device can do.
DENSE_SIDE = {"cuda": 8192, "cpu": 2048}
TINY_DENSE_SIDE, TINY_ROUNDS = 64, 3


def make_parser(description: str, names: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser with the options of sweeps against peers, which are called `names`."""
    parser = plain_parser(description)
    parser.add_argument("--contestants", help=f"of {', '.join(names)}; ours are always there")
    parser.add_argument("--peers", type=Path, help="folder into which requirements/benchmark.txt was installed")
    return parser


def plain_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all sweeps have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="what tools.build.variants has made")
    parser.add_argument("--device", help="cpu or cuda; by default what was built for")
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--minutes", type=float, help="after this time end the case at hand and start no other")
    parser.add_argument("--output", type=Path, help="result file; by default in benchmarks/results, none if tiny")
    parser.add_argument("--tiny", action="store_true", help="small matrices and few rounds, to see that it runs")
    return parser


def prepare(arguments: argparse.Namespace) -> tuple[ModuleType, torch.device]:
    """Make the peers importable, set the threads, and return the kernel and the device."""
    peers.add_folder(arguments.peers)
    return load(arguments)


def load(arguments: argparse.Namespace) -> tuple[ModuleType, torch.device]:
    """Set the threads, and return the kernel and the device."""
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    kernel, device = load_built(arguments.build)
    return kernel, torch.device(arguments.device) if arguments.device else device


def sizes(arguments: argparse.Namespace, device: torch.device, rounds: Mapping[str, int]) -> tuple[int, int]:
    """Return the number of timed rounds, from `rounds` by type of device, and the side of the dense product."""
    if arguments.tiny:
        return TINY_ROUNDS, TINY_DENSE_SIDE
    return rounds[device.type], DENSE_SIDE[device.type]


def chosen(given: str | None, names: Sequence[str], default: Sequence[str], what: str) -> tuple[str, ...]:
    """Return the names in the comma-separated `given`, or `default` without it. ValueError for names not in `names`."""
    if given is None:
        return tuple(default)
    unknown = sorted(set(given.split(",")) - set(names))
    if unknown:
        raise ValueError(f"{what} must be of {', '.join(names)}, got {', '.join(unknown)}")
    return tuple(given.split(","))


def chosen_contestants(
    given: str | None, own: Sequence[str], peers: Sequence[str], default: Sequence[str]
) -> tuple[str, ...]:
    """Return our `own` contestants, which are always there, and those that are `chosen` among the peers."""
    return *own, *chosen(given, peers, default, "contestants")


def run_cases(
    topic: str, bench, arguments: argparse.Namespace, settings: Mapping, works: Mapping[str, Callable[[Deadline], dict]]
) -> list[dict]:
    """Return a row for every case in `works`, whose call measures it. Once the time is up, rows are unmeasured.

    Rows are in the results file as soon as they are known, and rows that it already has are not measured again.
    """
    described = {key: value for key, value in bench._asdict().items() if key not in ("kernel", "device")}
    content = facts(bench.kernel, bench.device, {**settings, **described, "peers": peers.versions()})
    results = ResultFile(path_of(topic, bench.device, arguments), content, list(works))
    deadline = Deadline(arguments.minutes)
    for key, measure in works.items():
        if not results.is_measured(key) and not deadline.passed():
            results.put(key, measure(deadline))
            print(f"{key}: {results.rows[key]['milliseconds']:.3f} ms", flush=True)
    return list(results.rows.values())


def path_of(topic: str, device: torch.device, arguments: argparse.Namespace) -> Path | None:
    """Return where results go. A tiny run writes them only if it is told to."""
    return arguments.output or (None if arguments.tiny else default_path(topic, device))
