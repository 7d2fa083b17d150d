"""Plan large models on up to thousands of GPUs, and predict a step from a stated model of links and GPUs.

python -m tools.scale.report [--build build] [--gpus 64 256 1024 4096] [--machine machine.json] [--write]
python -m tools.scale.report --redraw

Bytes, messages, FLOPs, imbalance and memory come from the plans that a step would follow. Milliseconds come from a
model and are not measured. `--write` puts tables and figure into docs/. `--redraw` does that with the last results and
with what `benchmarks.sweep_scale` has measured of the host since.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.built_kernel import find_variant, load_variant
from benchmarks.result_file import facts
from tools.pages import markdown
from tools.scale import tables
from tools.scale.figure import draw
from tools.scale.models import GPUS, MODELS
from tools.scale.plans import ASSUMED, WIRE, Case, Machine
from tools.scale.schemes import plan

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "scale-model.json"
PAGE = ROOT / "docs" / "distributed.md"
# From this number of GPUs on, teams are planned, too, if products are float16.
WITH_TEAMS = 1024
FIGURE = ROOT / "docs" / "figures" / "scale.png"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="where the variants are")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--gpus", nargs="+", type=int, help="by default those of `models.GPUS`")
    parser.add_argument("--dtypes", nargs="+", choices=WIRE, default=list(WIRE), help="of the products")
    parser.add_argument("--link", type=float, default=ASSUMED.link_gb_per_s, help="GB/s a GPU, one way: %(default)s")
    parser.add_argument("--latency", type=float, default=ASSUMED.microseconds_per_peer, help="µs a peer: %(default)s")
    parser.add_argument("--rate", type=float, default=ASSUMED.tflop_per_s, help="TFLOP/s of products: %(default)s")
    parser.add_argument("--machine", type=Path, help="what `tools.scale.calibrate` told, which goes before these three")
    parser.add_argument("--team", type=int, default=4, help="ranks that may work on one matrix: %(default)s")
    parser.add_argument("--chunk-bytes", type=int, help="as Muon's; by default as its model of wire and products says")
    parser.add_argument("--write", action="store_true", help="renew the results, the tables and the figure of docs/")
    parser.add_argument("--redraw", action="store_true", help="tables and figure anew, from the results")
    options = parser.parse_args(arguments)
    if options.redraw:
        put_into_docs(json.loads(RESULTS.read_text()))
        return
    machine = machine_of(options.machine, Machine(options.link, options.latency, options.rate))
    kernel = load_variant(find_variant(options.build))
    console = Console()
    cases = [
        Case(model, gpus, dtype, team)
        for model in options.models
        for gpus in options.gpus or GPUS.get(model, ())
        for dtype in options.dtypes
        for team in ((1, options.team) if dtype == "float16" and gpus >= WITH_TEAMS else (1,))
    ]
    rows = [plan(kernel, case, machine, options.chunk_bytes) for case in track(cases, "planning", console=console)]
    built = {key: value for key, value in facts(kernel, torch.device("cpu"), {}).items() if key in ("commit", "dirty")}
    assumed = {"machine": asdict(machine), "chunk_bytes": options.chunk_bytes}
    results = {**built, **assumed, "rows": [asdict(row) for row in rows]}
    for made in tables.tables(results, measured_host()).values():
        console.print(made, highlight=False, soft_wrap=True)
    if options.write:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        put_into_docs(results)


def machine_of(path: Path | None, assumed: Machine) -> Machine:
    """Return the constants in a file of `tools.scale.calibrate`, and the assumed ones for those that it lacks."""
    return assumed if path is None else replace(assumed, **json.loads(path.read_text())["constants"])


def put_into_docs(results: dict) -> None:
    PAGE.write_text(filled(PAGE.read_text(), results))
    draw(results, FIGURE)


def filled(page: str, results: dict) -> str:
    """Return the page with new tables between its markers."""
    return markdown.fill(page, tables.tables(results, measured_host()))


def measured_host() -> dict[str, float]:
    """Return the host's milliseconds of a step by case, from all results files; the file with the later name wins."""
    milliseconds = {}
    for path in sorted(RESULTS.parent.glob("*.json")):
        content = json.loads(path.read_text())
        rows = content.get("results", ()) if isinstance(content, dict) else ()
        measured = [row for row in rows if isinstance(row, dict) and "host_milliseconds" in row]
        milliseconds.update({row["case"]: row["host_milliseconds"][1] for row in measured})  # of quartiles
    return milliseconds


if __name__ == "__main__":
    main()
