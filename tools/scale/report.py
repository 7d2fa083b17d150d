"""Plan large models on up to thousands of GPUs, and predict a step from a stated model of links and GPUs.

python -m tools.scale.report [--build build] [--gpus 64 256 1024 4096] [--machine machine.json] [--write]

Bytes, messages, FLOPs, imbalance and memory are those of the plans that a step would follow; milliseconds are a
model, no measurement. `--write` puts table and figure into docs/.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import matplotlib
from rich.console import Console
from rich.progress import track

from benchmarks.built_kernel import find_variant, load_variant
from tools.pages import markdown
from tools.scale.models import MODELS
from tools.scale.plans import ASSUMED, IN_FLIGHT, STEPS, Machine
from tools.scale.schemes import Row, plan

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "scale-model.json"
PAGE = ROOT / "docs" / "distributed.md"
FIGURE = ROOT / "docs" / "figures" / "scale.png"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="where the variants are")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--gpus", nargs="+", type=int, default=[64, 128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--link", type=float, default=ASSUMED.link_gb_per_s, help="GB/s a GPU, one way: %(default)s")
    parser.add_argument("--latency", type=float, default=ASSUMED.microseconds_per_peer, help="µs a peer: %(default)s")
    parser.add_argument("--rate", type=float, default=ASSUMED.tflop_per_s, help="TFLOP/s of products: %(default)s")
    parser.add_argument("--machine", type=Path, help="what `tools.scale.calibrate` told, which goes before these three")
    parser.add_argument("--chunk-bytes", type=int, help="as Muon's; by default as its model of wire and products says")
    parser.add_argument("--write", action="store_true", help="renew the results, the table and the figure of docs/")
    given = parser.parse_args(arguments)
    machine = machine_of(given.machine, Machine(given.link, given.latency, given.rate))
    kernel = load_variant(find_variant(given.build))
    console = Console()
    cases = [(model, gpus) for model in given.models for gpus in given.gpus]
    rows = [
        plan(kernel, model, gpus, machine, given.chunk_bytes)
        for model, gpus in track(cases, "planning", console=console)
    ]
    results = {"machine": asdict(machine), "chunk_bytes": given.chunk_bytes, "rows": [asdict(row) for row in rows]}
    console.print(table(results), highlight=False, soft_wrap=True)
    if given.write:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(filled(PAGE.read_text(), results))
        draw(results, FIGURE)


def machine_of(path: Path | None, assumed: Machine) -> Machine:
    """Return what a file of `tools.scale.calibrate` says, and what is assumed where it could not tell."""
    return assumed if path is None else replace(assumed, **json.loads(path.read_text())["constants"])


def filled(page: str, results: dict) -> str:
    """Return the page with the table between its markers made anew."""
    return markdown.fill(page, {"scale": table(results)})


def table(results: dict) -> str:
    """Return the rows as a table, with the model that the milliseconds follow from."""
    machine = results["machine"]
    rows = [Row(**row) for row in results["rows"]]
    schemes = list(rows[0].seconds)
    head = [
        "model",
        "GPUs",
        "chunks",
        "MiB sent",
        "TFLOP",
        "imbalance",
        "MiB in flight",
        *(f"{s}, ms" for s in schemes),
    ]
    lines = []
    for row in rows:
        numbers = f"{row.sent_bytes / 2**20:,.0f}", f"{row.flop / 1e12:.1f}", f"{row.imbalance:.2f}"
        predicted = (f"{1e3 * row.seconds[scheme]:,.1f}" for scheme in schemes)
        in_flight = f"{row.bytes_in_flight / 2**20:,.0f}"
        lines.append([row.model, f"{row.gpus:,}", str(row.chunks), *numbers, in_flight, *predicted])
    return (
        f"{markdown.table(head, lines, numbers=True)}\n\n"
        f"Bytes, FLOPs ({STEPS} steps, symmetric products in full) and memory are of the busiest rank.\n"
        'An element has two bytes each way, as with `ns_dtype="bfloat16"`; float16 has four on its first way.\n'
        "Milliseconds are predicted, not measured: a GPU sends "
        f"{machine['link_gb_per_s']:g} GB/s, a collective takes {machine['microseconds_per_peer']:g} µs a peer,\n"
        f"products run at {machine['tflop_per_s']:g} TFLOP/s, and exchanges overlap with them; {IN_FLIGHT} chunks fly "
        "while one is worked on."
    )


def draw(results: dict, path: Path) -> None:
    """Draw the predicted step over the number of GPUs, a panel for each model."""
    rows = [Row(**row) for row in results["rows"]]
    models = list(dict.fromkeys(row.model for row in rows))
    figure, panels = plt.subplots(1, len(models), figsize=(5.2 * len(models), 4), squeeze=False, layout="constrained")
    for panel, model in zip(panels[0], models):
        own = [row for row in rows if row.model == model]
        for scheme in own[0].seconds:
            milliseconds = [1e3 * row.seconds[scheme] for row in own]
            panel.plot([row.gpus for row in own], milliseconds, marker="o", markersize=4, label=scheme)
        panel.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="predicted step, ms", title=model)
        panel.set_xticks([row.gpus for row in own], [str(row.gpus) for row in own])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
