"""`python -m tools.draw`: pictures hold what files say, come for both themes, and foreign files are refused."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from examples import logging_callback
from examples.logging_callback import Callback, Lines
from tools.draw import __main__ as program
from tools.draw.areas import memory, routing, state_bytes, treemap
from tools.draw.checkpoint import Entry, read_checkpoint
from tools.draw.curves import band, loss, update_rms
from tools.draw.log import read_log
from tools.draw.spectra import draw_spectra, spectra
from tools.draw.step_time import own_times, read_trace, step_time

STEPS = 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(30, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.lm_head = nn.Linear(8, 30)

    def forward(self, symbols):
        x = self.tok_embeddings(symbols)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.lm_head(x)


def train(kernel, path, seed):
    """Train a small model with a log at `path`; return it and its optimizer."""
    torch.manual_seed(seed)
    model = Model()
    opt = kernel.Muon(model.named_parameters(), lr=1e-2, ns_dtype="float32")
    log = Callback(opt, Lines(path), every=2, watched={"layers.0.weight": model.layers[0].weight})
    for step in range(STEPS):
        symbols = torch.randint(30, (32,))
        value = nn.functional.cross_entropy(model(symbols), (symbols + 1) % 30)
        value.backward()
        opt.step()
        log(step, value)
        opt.zero_grad()
    return model, opt


@pytest.fixture(scope="module")
def run(kernel, tmp_path_factory):
    """Logs of two seeds, a checkpoint and a trace of the last step."""
    folder = tmp_path_factory.mktemp("run")
    logs = [folder / f"muon-{seed}.jsonl" for seed in range(2)]
    model, opt = [train(kernel, path, seed) for seed, path in enumerate(logs)][-1]
    torch.save({"model": model.state_dict(), "training": {"optimizer": opt.state_dict()}}, folder / "checkpoint.pt")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.arange(30)).sum().backward()
        opt.step()
    profile.export_chrome_trace(str(folder / "trace.json"))
    files = dict(logs=logs, checkpoint=folder / "checkpoint.pt", trace=folder / "trace.json")
    return SimpleNamespace(model=model, opt=opt, **files)


def files_for(run, what):
    return {"loss": run.logs, "updates": run.logs[:1], "step": [run.trace]}.get(what, [run.checkpoint])


@pytest.mark.parametrize("what", program.PICTURES)
def test_a_picture_is_four_files(run, kernel, what, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program, "chosen_variants", lambda asked: {"build": None})
    monkeypatch.setattr(program, "load_variant", lambda folder: kernel)
    assert program.main([what, "--from", *map(str, files_for(run, what)), "--output", str(tmp_path / "pictures")]) == 0
    names = [f"{what}-{theme}.{kind}" for theme in ("light", "dark") for kind in ("png", "svg")]
    written = [tmp_path / "pictures" / name for name in names]
    assert capsys.readouterr().out.split() == list(map(str, written))
    pictures = [path.read_bytes() for path in written]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures[::2])
    assert all(b"</svg>" in picture for picture in pictures[1::2]) and len(set(pictures)) == 4


def test_a_log_has_the_metrics_of_its_steps(run):
    log = read_log(run.logs[0])
    assert log.name == "muon" and log.column("step") == [0, 2, 4]
    assert {"muon_update_rms", "update_rms/layers.0.weight"} <= set(log.metrics())
    assert all(later > earlier > 0 for earlier, later in zip(log.column("seconds"), log.column("seconds")[1:]))


def test_updates_of_a_layer_are_what_it_moved(kernel):
    p = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
    opt, told = kernel.Muon([("up.weight", p)]), []
    log = Callback(opt, lambda step, numbers: told.append((step, numbers)), watched={"up.weight": p})
    before, p.grad = p.detach().clone(), torch.ones(8, 8)
    opt.step()
    log(7, torch.tensor(0.5))
    ((step, numbers),) = told
    moved = (p.detach() - before).square().mean().sqrt().item()
    assert (step, numbers["loss"], numbers["update_rms/up.weight"]) == (7, 0.5, moved) and moved > 0


def test_seeds_are_a_band_around_their_mean(run):
    logs = [read_log(path) for path in run.logs]
    losses, steps = band(logs, "loss")
    assert losses.tolist() == [log.column("loss") for log in logs] and steps.tolist() == [0, 2, 4]
    axes = loss(logs)("light").axes
    assert [a.get_xlabel() for a in axes] == ["step", "seconds"]
    np.testing.assert_allclose(axes[0].lines[0].get_ydata(), losses.mean(axis=0))
    shaded = axes[0].collections[0].get_paths()[0].vertices
    for column, step in enumerate(steps):
        heights = shaded[shaded[:, 0] == step, 1]
        assert (heights.min(), heights.max()) == (losses[:, column].min(), losses[:, column].max())


def test_updates_are_one_curve_a_layer(run):
    log = read_log(run.logs[0])
    (line,) = update_rms([log])("dark").axes[0].lines
    assert line.get_label() == "layers.0.weight"
    assert list(line.get_ydata()) == log.column("update_rms/layers.0.weight")


def test_spectra_are_singular_values(run, kernel):
    pairs = spectra(read_checkpoint(run.checkpoint), kernel)
    assert list(pairs) == [f"layers.{i}.weight" for i in range(3)]
    for name, (before, after) in pairs.items():
        G = torch.load(run.checkpoint)["training"]["optimizer"]["state"][int(name.split(".")[1])]["momentum_buffer"]
        torch.testing.assert_close(before, torch.linalg.svdvals((G / G.norm()).double()), atol=1e-6, rtol=1e-5)
        exact = torch.linalg.svdvals(kernel.orthogonalize(G, dtype=torch.float32).double())
        torch.testing.assert_close(after, exact)
    panels = draw_spectra(pairs)("light").axes
    assert [axes.get_title() for axes in panels] == list(pairs)
    for axes, values in zip(panels, pairs.values(), strict=True):
        assert [list(line.get_ydata()) for line in axes.lines] == [value.tolist() for value in values]


def test_bars_sum_to_the_bytes_of_the_state_and_have_the_names_of_branches(run):
    entries = read_checkpoint(run.checkpoint)
    said = sum(row.state_bytes for row in run.opt.explain())
    assert sum(state_bytes(entries).values()) == said
    axes = memory(entries)("light").axes[0]
    assert sum(bar.get_width() for bar in axes.patches) * 2**20 == pytest.approx(said)
    assert {branch for branch, _ in state_bytes(entries)} == {"muon", "adamw"}
    axes = memory([Entry("p", branch, {"a": torch.ones(2)}) for branch in ("nadamw", "lion")])("light").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["NAdamW: a", "lion: a"]


def test_areas_are_in_proportion_to_parameters(run):
    entries = read_checkpoint(run.checkpoint)
    assert {e.name: (e.branch, e.elements) for e in entries} == {
        row.name: (row.branch, math.prod(row.shape)) for row in run.opt.explain()
    }
    areas = [patch.get_width() * patch.get_height() for patch in routing(entries)("dark").axes[0].patches]
    sizes = [e.elements for e in sorted(entries, key=lambda e: (not e.is_muon, -e.elements))]
    np.testing.assert_allclose(np.array(areas) / sum(areas), np.array(sizes) / sum(sizes))


def test_a_parameter_without_a_state_has_no_area():
    known, unknown = Entry("a", "muon", {"momentum_buffer": torch.ones(4, 2)}), Entry("b", "adamw", {})
    axes = routing([unknown, known])("light").axes[0]
    assert len(axes.patches) == 1 and axes.texts[-1].get_text() == "Muon: 100% of 8 elements"
    with pytest.raises(ValueError, match="no parameter has a state"):
        routing([unknown])


@pytest.mark.parametrize("seed", range(5))
def test_a_treemap_fills_its_box_without_overlaps(seed):
    """Corners of rectangles lie inside none of the others, and areas are those of the sizes."""
    draw = random.Random(seed)
    sizes = sorted((draw.uniform(1, 100) for _ in range(30)), reverse=True)
    boxes = treemap(sizes, (0.0, 0.0, 3.0, 2.0))
    np.testing.assert_allclose([w * h for _, _, w, h in boxes], np.array(sizes) * 6 / sum(sizes))
    for x, y, w, h in boxes:
        middle = x + w / 2, y + h / 2
        assert sum(a < middle[0] < a + c and b < middle[1] < b + d for a, b, c, d in boxes) == 1
        assert -1e-9 <= x and x + w <= 3 + 1e-9 and -1e-9 <= y and y + h <= 2 + 1e-9


def test_time_is_told_without_what_is_inside():
    def event(name, ts, dur, tid=1, cat="cpu_op"):
        return {"name": name, "ts": ts, "dur": dur, "tid": tid, "pid": 1, "cat": cat, "ph": "X"}

    events = [
        event("Optimizer.step#Muon.step", 10, 20, cat="user_annotation"),
        event("mm", 12, 5), event("copy", 13, 1), event("mm", 40, 4), event("mm", 41, 3, tid=2),
    ]  # fmt: skip
    assert own_times(events) == {
        ("Optimizer.step#Muon.step", True): 15, ("mm", True): 4, ("copy", True): 1, ("mm", False): 7,
    }  # fmt: skip


def test_bars_of_a_trace_sum_to_its_time(run):
    events = read_trace(run.trace)
    bars = step_time(events)("light").axes[0].patches
    assert sum(bar.get_width() for bar in bars) == pytest.approx(sum(own_times(events).values()) / 1e3)
    assert any(inside for _, inside in own_times(events))


FOREIGN = {
    "a sentence": ("loss", b"training begins\n", "line 1 of .* is no JSON"),
    "no step": ("loss", b'{"loss": 1.0}\n', 'must be {"step"'),
    "a list": ("updates", b"[1, 2]\n", "line 1"),
    "words": ("loss", b'{"step": 1, "loss": "high"}\n', "loss in line 1 of .* must be a number, got 'high'"),
    "two runs": ("loss", b'{"step": 1, "loss": 1}\n{"step": 0, "loss": 1}\n', "its steps go back"),
    "nothing": ("loss", b"", "it has no line"),
    "bytes": ("loss", b"\xff\xfe\x00", "it is not text"),
    "no loss": ("loss", b'{"step": 1}\n', "has lines without a loss"),
    "no updates": ("updates", b'{"step": 1, "metrics": {"x": 1}}\n', "no metric update_rms"),
    "a log as a checkpoint": ("memory", b'{"step": 1}\n', "is no checkpoint that torch.load reads"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_files_are_refused_in_one_line(case, tmp_path, capsys):
    what, content, message = FOREIGN[case]
    path = tmp_path / "file"
    path.write_bytes(content)
    assert program.main([what, "--from", str(path), "--output", str(tmp_path / "pictures")]) == 1
    told = capsys.readouterr().err
    assert told.startswith("tools.draw: ") and told.count("\n") == 1 and "file" in told
    assert re.search(message, told)
    assert not (tmp_path / "pictures").exists()


@pytest.mark.parametrize("group", [{"params": [0]}, [0], {"use_muon": False, "params": [0], "param_names": ["p"]}])
def test_a_checkpoint_of_another_optimizer_is_refused(group, tmp_path):
    torch.save({"optimizer": {"state": {}, "param_groups": [group]}}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"has no state of Muon: it needs opt\.state_dict\(\).*\['optimizer'\]"):
        read_checkpoint(tmp_path / "other.pt")


def test_sinks_of_others_are_called_as_they_are(monkeypatch):
    """By their documented names; neither package is needed before it is asked for."""
    told = []
    writer = SimpleNamespace(add_scalar=lambda *scalar: told.append(scalar), flush=lambda: told.append("flush"))
    board = ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = lambda folder: writer
    tracker = ModuleType("trackio")
    tracker.init = lambda project: SimpleNamespace(log=lambda numbers, step: told.append((numbers, step)))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    logging_callback.tensorboard("folder")(3, {"loss": 0.5})
    logging_callback.trackio("project")(3, {"loss": 0.5})
    assert told == [("loss", 0.5, 3), "flush", ({"loss": 0.5}, 3)]


def test_lines_are_readable_while_the_run_goes_on(tmp_path):
    lines = Lines(tmp_path / "run.jsonl")
    lines(0, {"seconds": 1.5, "loss": 0.5, "rms": 0.1})
    (line,) = (tmp_path / "run.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 0, "seconds": 1.5, "loss": 0.5, "metrics": {"rms": 0.1}}
