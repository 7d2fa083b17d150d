"""Draw what a run left behind, for light and dark pages, as PNG and SVG.

    python -m tools.draw WHAT --from FILE [FILE ...] --output FOLDER

loss      from logs: against steps and time; of several seeds (muon-0.jsonl, muon-1.jsonl) the mean and the range
updates   from a log: the root mean square of each layer's updates
spectra   from a checkpoint: singular values of momentum before orthogonalization and after it; needs a build in build/
routing   from a checkpoint: who updates each parameter, and how large it is
memory    from a checkpoint: bytes of the state by branch
step      from a trace of torch.profiler: which operators the time goes to

A log has a line of JSON a step, as `tools/draw/log.py` says and `examples/logging_callback.py` writes; a checkpoint is
a file of `torch.save(opt.state_dict(), path)`, or of a dict with that in it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.built_kernel import load_variant
from benchmarks.variants import chosen_variants

from . import areas, curves
from .checkpoint import Entry, read_checkpoint
from .log import read_log
from .spectra import draw_spectra, spectra
from .step_time import read_trace, step_time
from .theme import Drawing, save


def _of_one(read: Callable, drawing: Callable) -> Callable[[Sequence[Path]], Drawing]:
    """Return what draws one file, which `read` reads; ValueError for several."""

    def made(paths: Sequence[Path]) -> Drawing:
        if len(paths) != 1:
            raise ValueError(f"this is drawn from one file, got {len(paths)}")
        return drawing(read(paths[0]))

    return made


def _spectra(entries: Sequence[Entry]) -> Drawing:
    (folder, *_) = chosen_variants(None).values()
    return draw_spectra(spectra(entries, load_variant(folder)))


PICTURES: dict[str, Callable[[Sequence[Path]], Drawing]] = {
    "loss": lambda paths: curves.loss([read_log(path) for path in paths]),
    "updates": lambda paths: curves.update_rms([read_log(path) for path in paths]),
    "spectra": _of_one(read_checkpoint, _spectra),
    "routing": _of_one(read_checkpoint, areas.routing),
    "memory": _of_one(read_checkpoint, areas.memory),
    "step": _of_one(read_trace, step_time),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.draw", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=PICTURES)
    parser.add_argument("--from", dest="files", nargs="+", type=Path, required=True, metavar="FILE")
    parser.add_argument("--output", type=Path, required=True, help="a folder, made where there is none")
    options = parser.parse_args(arguments)
    try:
        written = save(options.what, PICTURES[options.what](options.files), options.output)
    except (ValueError, OSError) as error:
        print(f"tools.draw: {error}", file=sys.stderr)
        return 1
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
