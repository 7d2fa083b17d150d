"""The comparison in words and numbers: summary.json, runs.json, the routing table, the last table, the verdict."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kernels
import torch
from rich.table import Table

from benchmarks.machine import cpu_name

from .comparison import BETAS, TRIAL_SEED, WEIGHT_DECAY, Comparison
from .corpus import Corpus
from .loading import Origin
from .training import BATCH, WARM_UP, Record


def summary(comparison: Comparison, corpus: Corpus, origin: Origin) -> dict[str, Any]:
    """Return what summary.json holds. Losses are in nats per character, times without evaluation."""
    match = comparison.match()
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "kernels": kernels.__version__,
            "optimizer": origin.facts(),
        },
        "machine": {"cpu": cpu_name(), "threads": torch.get_num_threads()},
        "corpus": {
            "sha256": corpus.sha256,
            "train_characters": corpus.train.numel(),
            "validation_characters": corpus.validation.numel(),
            "symbols": corpus.symbols,
        },
        "setting": {
            **asdict(comparison.plan),
            "parameters": sum(p.numel() for p in comparison.model.parameters()),
            "batch": BATCH,
            "warm_up_steps": WARM_UP,
            "trial_seed": TRIAL_SEED,
            "weight_decay": WEIGHT_DECAY,
            "adamw_betas": BETAS,
        },
        "results": {name: result(comparison, name) for name in comparison.plan.learning_rates},
        "muon_matches_adamw_at": match and {"step": match[0], "seconds": match[1]},
        "muon_is_better": is_better(comparison),
        "trials": [run_summary(record) for record in comparison.trials],
        "finals": [run_summary(record) for record in comparison.finals],
    }


def result(comparison: Comparison, optimizer: str) -> dict[str, Any]:
    losses = [record.validation[-1] for record in comparison.finals_of(optimizer)]
    lr, rates = comparison.chosen(optimizer), comparison.plan.learning_rates[optimizer]
    gradient, stepping = comparison.step_ms(optimizer)
    return {
        "lr": lr,
        "lr_is_at_the_edge_of_the_trial": lr in (rates[0], rates[-1]),
        "validation_loss": {"mean": comparison.mean_loss(optimizer), "min": min(losses), "max": max(losses)},
        "median_ms_per_step": {"forward_and_backward": gradient, "optimizer": stepping},
        "seconds_per_run": [record.seconds[-1] for record in comparison.finals_of(optimizer)],
    }


def run_summary(record: Record) -> dict[str, Any]:
    return {**asdict(record.run), "validation_loss": record.validation[-1], "seconds": record.seconds[-1]}


def is_better(comparison: Comparison) -> bool:
    """Whether Muon's mean validation loss is below AdamW's; no for one that is not a number."""
    return comparison.mean_loss("Muon") < comparison.mean_loss("AdamW")


def table(results: dict[str, Any]) -> Table:
    """Return the table that the demonstration ends with, of `summary(...)["results"]`."""
    columns = Table("optimizer", caption="loss: nats per character of validation text, over the seeds; ms: medians")
    for heading in ("best lr", "mean loss", "min", "max", "ms a step", "optimizer's"):
        columns.add_column(heading, justify="right")
    for name, of_name in results.items():
        losses, (gradient, stepping) = of_name["validation_loss"], of_name["median_ms_per_step"].values()
        numbers = (f"{losses[key]:.3f}" for key in ("mean", "min", "max"))
        columns.add_row(name, f"{of_name['lr']:g}", *numbers, f"{gradient + stepping:.1f}", f"{stepping:.1f}")
    return columns


def verdict(comparison: Comparison) -> str:
    muon, adamw = comparison.mean_loss("Muon"), comparison.mean_loss("AdamW")
    match = comparison.match()
    if not is_better(comparison):
        return f"Muon's validation loss, {muon:.3f}, is NOT below AdamW's, {adamw:.3f}."
    at = f" It has AdamW's final loss after {match[0]:.0f} of {comparison.plan.final_steps} steps." if match else ""
    return f"Muon ends {adamw - muon:.3f} nats per character below AdamW.{at}"


def write(comparison: Comparison, content: dict[str, Any], folder: Path) -> None:
    """Write summary.json, `content`; runs.json, every number measured; and routing.txt."""
    (folder / "summary.json").write_text(json.dumps(content, indent=1) + "\n")
    runs = {"trials": comparison.trials, "finals": comparison.finals}
    (folder / "runs.json").write_text(json.dumps(runs, default=asdict) + "\n")
    (folder / "routing.txt").write_text(f"{comparison.muon.explain()}\n")
