"""The benchmark of launches: Triton's own launcher runs, and each call of a row starts one kernel."""

from __future__ import annotations

import json
import shutil

import pytest

from benchmarks import sweep_launch

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, as Triton does")


def test_launch_sweep_times_every_product(variant, tmp_path, capsys):
    file = tmp_path / "launch.json"
    sweep_launch.main(["--tiny", "--build", str(variant.parent), "--output", str(file)])
    rows = json.loads(file.read_text())["results"]
    assert [row["case"] for row in rows[::2]] == list(sweep_launch.operands())
    assert all(0 < low <= middle <= high for low, middle, high in (row["microseconds"] for row in rows))
    assert "kernel[grid]" in capsys.readouterr().out


def test_launch_sweep_refuses_calls_that_launch_nothing(variant, monkeypatch):
    """A row that another path took would look fast."""
    work = {"nothing": lambda: None}
    monkeypatch.setattr(sweep_launch, "works", lambda module, calls: work.items())
    with pytest.raises(RuntimeError, match="must launch as often, got 0 launches"):
        sweep_launch.measure(variant, rounds=1, calls=1)
