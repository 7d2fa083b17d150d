"""Each tool that reads traces of torch's profiler says in one line what is wrong with a file."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tools.draw import __main__ as draw
from tools.scale import calibrate, overlap

NAMELESS = {"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": 0, "dur": 1}, {"ph": "X", "name": "cut off"}]}
FOREIGN = {
    "a list": (b"[1]", "is no trace"),
    "a log": (b'{"step": 1}\n', "is no trace"),
    "bytes": (b"\xff\xfe\x00", "is no trace"),
    "events of another kind": (b'{"traceEvents": [1]}', "is no trace"),
    "events without a name": (json.dumps(NAMELESS).encode(), "has no operator|has no step of Muon|has 0 steps of Muon"),
    "no file": (None, "No such file or directory"),
}
TOOLS = {
    "calibrate": lambda path, output: calibrate.main([path, "--output", output]),
    "overlap": lambda path, output: overlap.main([path, "--output", output]),
    "draw": lambda path, output: sys.exit(draw.main(["step", "--from", path, "--output", output])),
}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("case", FOREIGN)
def test_a_foreign_file_is_told_in_one_line(tool, case, tmp_path, capsys):
    content, message = FOREIGN[case]
    if content is not None:
        (tmp_path / "trace.json").write_bytes(content)
    with pytest.raises(SystemExit) as end:
        TOOLS[tool](str(tmp_path / "trace.json"), str(tmp_path / "output"))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(("usage:", " "))]
    assert end.value.code and re.search(message, line) and not (tmp_path / "output").exists()
