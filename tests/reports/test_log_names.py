"""Logs whose names differ in a seed alone are runs of one kind: one curve, and a band. Nothing else is put together."""

from __future__ import annotations

import pytest

from tools.draw.curves import loss
from tools.draw.log import by_name, read_log

LINES = '{"step": 0, "loss": 3.0}\n{"step": 1, "loss": 2.0}\n'


@pytest.mark.parametrize(
    "files, kinds",
    [
        (("muon-seed0", "muon-seed1", "adamw-seed0"), {"muon": 2, "adamw": 1}),
        (("muon_1", "muon_2", "muon_10"), {"muon": 3}),
        (("muon.seed-1", "muon.seed-2"), {"muon": 2}),
        (("adamw-lr0.01", "adamw-lr0.02"), {"adamw-lr0.01": 1, "adamw-lr0.02": 1}),
        (("muon-1e-2", "muon-1e-3"), {"muon-1e-2": 1, "muon-1e-3": 1}),
        (("gpt2", "gpt3"), {"gpt2": 1, "gpt3": 1}),
        (("lr0.02-seed0", "lr0.02-seed1"), {"lr0.02": 2}),
        (("7", "seed3"), {"7": 1, "seed3": 1}),
    ],
    ids=str,
)
def test_only_seeds_make_one_kind(tmp_path, files, kinds):
    for name in files:
        (tmp_path / f"{name}.jsonl").write_text(LINES)
    logs = [read_log(tmp_path / f"{name}.jsonl") for name in files]
    assert {name: len(runs) for name, runs in by_name(logs).items()} == kinds
    curves = loss(logs)("light").axes[0].lines
    texts = [f"{name} ({count} runs)" if count > 1 else name for name, count in kinds.items()]
    assert [curve.get_label() for curve in curves] == [f"{text}, at the end 2.000" for text in texts]
