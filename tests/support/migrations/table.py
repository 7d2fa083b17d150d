"""A page's content: one origin, its call, ours, and a line for each of its arguments."""

from __future__ import annotations

from typing import NamedTuple

NOTHING = "nothing"


class Line(NamedTuple):
    """One argument there and what stands for it here, as code that the page shows and the test runs."""

    arguments: str  # as they are written there
    muon: str = ""  # settings of Muon's group here
    rest: str = ""  # settings of AdamW's group here
    changes: str = NOTHING
    part: str = "muon"  # which call or group there takes them: muon or rest
    refused: str = ""  # what the error says of an argument that is not taken here
    scale: float = 1e8  # of the matrices' gradients in the test, far above every eps unless eps is the subject
    known_there: bool = True  # whether what the tests run there takes the argument, on a CPU


_AS_IT_STANDS = Line("")


class Origin(NamedTuple):
    """Another optimizer; in code `matrices` and `rest` are lists of `(name, parameter)`."""

    name: str  # of the page
    title: str
    introduction: str
    there: str  # a complete call with {muon} and {rest} where arguments go
    muon: str  # its defaults, and what it does unasked, as settings of Muon's group here
    rest: str  # likewise of AdamW's group
    lines: tuple[Line, ...]
    checkpoint: str  # how to take one along, empty where that cannot be; `saved` is what was loaded from a file
    tested: str
    tried: str = ""  # what the test runs for `there`, where that needs more than is there
    differences: str = ""  # that no argument has
    convolutions: bool = False
    scale_of_rest: float = 1.0  # of the other gradients in the test, far above an eps that counts differently there


def call_here(origin: Origin) -> str:
    """Return the complete call that does what `origin.there` does, with parameters as there."""
    muon = origin.muon.replace("\n", "\n        ")
    return (
        "opt = optimizer.Muon([\n"
        f"    dict(\n        params=matrices, use_muon=True,\n        {muon},\n    ),\n"
        f"    dict(params=rest, use_muon=False, {origin.rest}),\n"
        "])\n"
    )


def call_there(origin: Origin, line: Line = _AS_IT_STANDS, tried: bool = True) -> str:
    """Return the call there with a line's arguments, as the test runs it or as the page shows it."""
    template = origin.tried if tried and origin.tried else origin.there
    arguments = f", {line.arguments}" if line.arguments and line.known_there else ""
    return template.format(**{"muon": "", "rest": "", line.part: arguments})
