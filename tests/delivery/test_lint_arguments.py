"""tools/lint/kernels.py: no argument is ignored."""

from __future__ import annotations

import pytest

from tools.lint import kernels


def test_results_of_several_tritons_are_not_asked_for_in_one_file(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["kernels", "--all-triton", "--json", "found.json"])
    with pytest.raises(SystemExit):
        kernels.main()
    assert "--json: not allowed with argument --all-triton" in capsys.readouterr().err
