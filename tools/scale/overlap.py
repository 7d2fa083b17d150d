"""Draw what a process did in its last steps of Muon: packing, waiting, orthogonalizing, and what was on its way.

python -m tools.scale.overlap TRACE.0.json [--output overlap.png] [--step -1]

The traces are those of `examples.train_fsdp2 --trace TRACE`. An exchange is drawn from the sending of a chunk to the
end of the wait for it; it may have ended earlier. The part of it that is not waited for is hidden behind work.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from tools.scale.traces import ON_GPU, SEND, STEP, read_timed

COLORS = {
    "muon.pack": "tab:green",
    "muon.orthogonalize": "tab:blue",
    "muon.descend": "tab:purple",
    "muon.wait": "tab:red",
}


class Span(NamedTuple):
    """A stage, in milliseconds from the start of its step."""

    name: str
    start: float
    stop: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--output", type=Path, default=Path("overlap.png"))
    parser.add_argument("--step", type=int, default=-1, help="which of the traced steps: %(default)s")
    options = parser.parse_args(arguments)
    try:
        spans = spans_of_step(read_timed(options.trace)["traceEvents"], options.step)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    flying = exchanges(spans)
    waited = sum(span.stop - span.start for span in spans if span.name == "muon.wait")
    draw(spans, flying, options.output)
    total = sum(stop - start for start, stop in flying)
    print(
        f"{len(flying)} exchanges, {total:.2f} ms on their way, {waited:.2f} ms waited for; drawn in {options.output}"
    )


def spans_of_step(events: Sequence[dict], step: int) -> list[Span]:
    """Return the stages of one of the traced steps, in the order of their starts; ValueError if there is none.

    They are those of the host, which sends and waits; what they launched on a GPU may end after its step.
    """
    events = [event for event in events if event["cat"] != ON_GPU]
    steps = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == STEP)
    if not -len(steps) <= step < len(steps):
        raise ValueError(f"the trace has {len(steps)} steps of Muon, there is no step {step}")
    first, last = steps[step]
    inside = (event for event in events if event["name"].startswith("muon."))
    # Numbers may follow a name, as they do for products.
    stages = [(event["name"].split()[0], event["ts"], event["ts"] + event["dur"]) for event in inside]
    spans = [Span(name, (a - first) / 1e3, (b - first) / 1e3) for name, a, b in stages if first <= a <= last]
    return sorted(spans, key=lambda span: span.start)


def exchanges(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Return when each exchange began and when the wait for it ended. They are waited for in the order they began."""
    sent = [span.start for span in spans if span.name == SEND]
    waits = [span.stop for span in spans if span.name == "muon.wait"]
    return list(zip(sent, waits, strict=True))


def draw(spans: Sequence[Span], flying: Sequence[tuple[float, float]], path: Path) -> None:
    """Draw the stages in one line and each exchange in a line of its own below."""
    figure, panel = plt.subplots(figsize=(10, 1.5 + 0.2 * len(flying)), layout="constrained")
    for name, color in COLORS.items():
        bars = [(span.start, span.stop - span.start) for span in spans if span.name == name]
        panel.broken_barh(bars, (0.1, 0.8), color=color, label=name.removeprefix("muon."))
    for line, (start, stop) in enumerate(flying, 1):
        panel.broken_barh([(start, stop - start)], (-line + 0.2, 0.6), color="0.7")
    panel.set(xlabel="ms of the step", yticks=[0.5, -len(flying) / 2], yticklabels=["process", "exchanges"])
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, 1.3), ncols=len(COLORS), frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
