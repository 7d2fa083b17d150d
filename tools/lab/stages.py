"""The order of the lab's stages, the time that each has, and where they work."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.built_kernel import find_variant, read_metadata
from benchmarks.machine import device_name, triton_version
from tools.build.commands import BuildError
from tools.lab.items import STAGES
from tools.lab.prove import prove
from tools.lab.records import Records, clock
from tools.lab.report import write_report
from tools.lab.runner import Stage, run_stage
from tools.lab.variant import PACKAGE, digest, prepare

ROOT = Path(__file__).resolve().parents[2]

# How the time is divided among the stages that run.
SHARES = {"environment": 3, "prove": 9, "tune": 8, "measure": 6}

# Exit statuses. A failure is said first, because more time would not mend it.
FINISHED, FAILED, OUT_OF_TIME = 0, 1, 2

# How many of the items that are left are named.
NAMED = 3

# Seconds kept for the report, and for ending a stage that does not end by itself.
RESERVE_SECONDS = 15.0


@dataclass(frozen=True)
class Places:
    """Where the lab works: `work` is scratch, `out` holds the records, the report goes to `results`."""

    work: Path
    out: Path
    results: Path
    configs: tuple[Path, ...]


def run_stages(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    sys.stdout.reconfigure(line_buffering=True)
    # Also ends the stage's process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began, on_gpu = time.monotonic(), torch.cuda.is_available()
    places = places_for(options, on_gpu)
    if not on_gpu:
        print("gpu-lab: there is no GPU here; this is a dry run of the whole flow on the CPU, which proves nothing")
    try:
        places.out.mkdir(parents=True, exist_ok=True)
        variants = prepare(options.build, places.work, "cuda" if on_gpu else "cpu")
    except (BuildError, OSError) as error:
        print(f"gpu-lab: {error}", file=sys.stderr)
        return FAILED
    device = "cuda" if on_gpu else "cpu"
    records = Records(places.out, identity(variants, torch.device(device)))
    if records.put_aside is not None:
        print(f"{places.out} had records of another device, commit or torch: they are in {records.put_aside.name}")
    variant_configs = find_variant(variants) / "kernels/speeds/configs"
    order = {
        "variants": str(variants),
        "device": device,
        "out": str(places.out),
        "configs": [str(folder) for folder in (variant_configs, *places.configs)],
        "tiny": not on_gpu,
    }
    chosen = [stage for stage in STAGES if stage == "environment" or not options.only or stage in options.only]
    unfinished = run_chosen(chosen, order, began + 60 * options.minutes - RESERVE_SECONDS, records)
    failed = write_report(records, places.results, time.strftime("%Y-%m-%d"))
    for name in unfinished:
        print(f"[{name}] {what_is_left(records.left(name))}")
    print(f"gpu-lab: {clock(time.monotonic() - began)} of {clock(60 * options.minutes)}, {failed} failed")
    return FAILED if failed else OUT_OF_TIME if unfinished else FINISHED


def run_chosen(chosen: Sequence[str], order: dict, end: float, records: Records) -> list[str]:
    """Run the chosen stages until `end` on the monotonic clock. Return those of which something is left."""
    unfinished = []
    for i, name in enumerate(chosen):
        share = SHARES[name] / sum(SHARES[later] for later in chosen[i:])
        until = time.monotonic() + max(end - time.monotonic(), 0.0) * share
        print(f"[{name}] has {clock(until - time.monotonic())} of {clock(end - time.monotonic())}")
        stage = Stage(name, f"tools.lab.{name}", order, until, records.file.with_name("lab.log"))
        if not (prove if name == "prove" else run_stage)(stage, records):
            unfinished.append(name)
    return unfinished


def what_is_left(keys: Sequence[str]) -> str:
    """Return in words which items of a stage are left."""
    if not keys:
        return "did not come to its end"
    more = f" and {len(keys) - NAMED} more" if len(keys) > NAMED else ""
    return f"{len(keys)} left: {', '.join(keys[:NAMED])}{more}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prove, tune and measure the package on the GPU that is here.")
    parser.add_argument("--only", action="append", choices=STAGES[1:], help="may be repeated; default: all stages")
    parser.add_argument("--minutes", type=float, default=8.0, help="in which it ends; default: %(default)s")
    parser.add_argument("--out", type=Path, help="for records, report and figures; resumed where it has records")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="what tools.build.variants has made")
    return parser.parse_args(arguments)


def places_for(options: argparse.Namespace, on_gpu: bool) -> Places:
    """Return the folders to work in. A dry run writes neither to the package nor to the results."""
    scratch = ROOT / "out/gpu-lab"
    if not on_gpu:
        dry = options.out or scratch / "dry"
        return Places(dry / "work", dry, dry, (dry / "configs",))
    out = options.out or scratch
    tree = PACKAGE / "kernels/speeds/configs"
    copies = (tree, out) if options.out else (tree,)
    return Places(scratch / "work", out, options.out or ROOT / "benchmarks/results", copies)


def identity(variants: Path, device: torch.device) -> dict:
    """Return everything in which records of one run must agree."""
    built = read_metadata(find_variant(variants))["provenance"]["kernel"]
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": triton_version(),
        "commit": built["commit"],
        "dirty": built["dirty"],
        "variant": digest(variants),
    }
