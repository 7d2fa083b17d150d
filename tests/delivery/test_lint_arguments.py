"""tools/lint/kernels.py: no argument is ignored, and a wrong one is told."""

from __future__ import annotations

import pytest

from tools.lint import kernels


def test_results_of_several_tritons_are_not_asked_for_in_one_file(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["kernels", "--all-triton", "--json", "found.json"])
    with pytest.raises(SystemExit):
        kernels.main()
    assert "--json: not allowed with argument --all-triton" in capsys.readouterr().err


def test_a_folder_that_is_no_package_is_told(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["kernels", "--package", str(tmp_path)])
    with pytest.raises(SystemExit):
        kernels.main()
    assert f"error: {tmp_path} has no folder kernels" in capsys.readouterr().err
