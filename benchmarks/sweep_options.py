"""What the sweeps share: their options, their results file, and the loop over their cases."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from benchmarks import peers
from benchmarks.built_kernel import load_built
from benchmarks.result_file import ERROR, ResultFile, default_path, facts, has_error
from benchmarks.timing import Deadline
from tests.support.proofs import race

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
    """Return a parser with the options of sweeps that time work on a device."""
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


def chosen(text: str | None, names: Sequence[str], default: Sequence[str], what: str) -> tuple[str, ...]:
    """Return the names in the comma-separated `text`, or `default` without it. ValueError for names not in `names`."""
    if text is None:
        return tuple(default)
    unknown = sorted(set(text.split(",")) - set(names))
    if unknown:
        raise ValueError(f"{what} must be of {', '.join(names)}, got {', '.join(unknown)}")
    return tuple(text.split(","))


def chosen_contestants(
    text: str | None, ways: Sequence[str], peers: Sequence[str], default: Sequence[str]
) -> tuple[str, ...]:
    """Return our `ways`, which are always there, and the contestants that are `chosen` among the peers."""
    return *ways, *chosen(text, peers, default, "contestants")


def run_cases(
    topic: str,
    bench,
    arguments: argparse.Namespace,
    settings: Mapping,
    works: Mapping[str, Callable[[Deadline, Mapping[str, str]], dict]],
) -> list[dict]:
    """Return a row for every case in `works`, whose call measures it, as `measure_cases` does.

    A call gets the deadline and the marks of contestants that it shall leave out, as they have lost the GPU before.
    """
    described = {key: value for key, value in bench._asdict().items() if key not in ("kernel", "device")}
    content = facts(bench.kernel, bench.device, {**settings, **described, "peers": peers.versions()})
    results = ResultFile(path_of(topic, bench.device, arguments), content, list(works))
    deadline = Deadline(arguments.minutes)

    def measure(key: str) -> Iterator[tuple[str, dict]]:
        row = works[key](deadline, results.lost)
        print(f"{key}: {row['milliseconds']:.3f} ms", flush=True)
        yield key, row

    measure_cases(results, {(key,): partial(measure, key) for key in works}, deadline, bench.contestants)
    return list(results.rows.values())


def measure_cases(
    results: ResultFile,
    works: Mapping[tuple[str, ...], Callable[[], Iterable[tuple[str, dict]]]],
    deadline: Deadline,
    contestants: Collection[str] = (),
) -> None:
    """Measure the cases in `works` that `results` lacks, until the time is up; those that raised before come last.

    A case is the keys of its rows, and its call yields each key and row, which are in the results file from then on.
    If it raises, the error becomes the status of the rows that it lacks, and the next case follows. An error that makes
    the GPU unusable is recorded and raised. If it is a peer's among the `contestants`, that is noted in `results`, too,
    and no later run launches that one.
    """
    lacking = [keys for keys in works if not all(map(results.is_measured, keys))]
    for keys in sorted(lacking, key=lambda keys: any(has_error(results.rows[key]) for key in keys)):
        if deadline.passed():
            return
        try:
            for key, row in works[keys]():
                results.put(key, row)
        except Exception as error:
            _record(error, keys, results)
            if isinstance(error, race.LostGpuError) and error.name in contestants and not peers.is_ours(error.name):
                results.lose(error.name, f"lost the GPU at {keys[0]}: {' '.join(error.why.split())}")
            if race.loses_gpu(error):
                raise


def _record(error: Exception, keys: Sequence[str], results: ResultFile) -> None:
    """Print an error, and put one line about it into the rows of a case that have no results."""
    traceback.print_exception(error)
    status = ERROR + " ".join(race.error_described(error).split())
    for key in keys:
        if not results.is_measured(key):
            results.put(key, {"status": status})
            print(f"{key}: {status}", file=sys.stderr, flush=True)


def path_of(topic: str, device: torch.device, arguments: argparse.Namespace) -> Path | None:
    """Return where results go. A tiny run writes them only if it is told to."""
    return arguments.output or (None if arguments.tiny else default_path(topic, device))
