"""Turn traces of real steps on several GPUs into the constants of the scale report's model.

python -m tools.scale.calibrate TRACE.0.json [TRACE.1.json ...] [--output machine.json]
python -m tools.scale.report --machine machine.json

The traces are chrome traces of torch's profiler over NCCL or gloo, one for each rank, preferably of all ranks. For gloo
they need `record_shapes=True`. A collective's time is the shortest among its ranks, because the last one to arrive does
not wait for others. Time is fitted as bytes / rate + peers * latency, by least squares of relative errors. The rate of
products is the sum of their FLOPs over the sum of their times, with the FLOPs of the standard iteration, whatever is
saved.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.scale.plans import ASSUMED
from tools.scale.traces import Exchange, Products, Trace, read_trace

# If bytes and peers are almost proportional (sine of the angle below this), errors of the times grow more than tenfold.
TOLD_APART = 0.1
ROUNDS = 20  # each with weights from the last fit; after five the weights change by less than a thousandth


@dataclass
class Fit:
    """Constants by name, as in `plans.Machine`, and remarks. A constant that could not be determined is missing."""

    constants: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)  # standard errors
    lines: list[str] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--output", type=Path, help="JSON for `tools.scale.report --machine`")
    options = parser.parse_args(arguments)
    try:
        traces = [read_trace(path) for path in options.traces]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    fit = calibrate(traces)
    print("\n".join([*fit.lines, *(f"Not told: {line}" for line in fit.untold)]))
    if options.output is not None:
        told = {"constants": fit.constants, "standard_errors": fit.errors, "said": fit.lines, "untold": fit.untold}
        options.output.write_text(json.dumps(told, indent=1) + "\n")


def calibrate(traces: Sequence[Trace]) -> Fit:
    """Return the constants that fit the traces of several ranks best."""
    fit = Fit(lines=[f"{len(traces)} ranks, {min(trace.steps for trace in traces)} steps"])
    exchanges = shortest(exchange for trace in traces for exchange in trace.exchanges)
    if len(traces) == 1 and exchanges:
        fit.untold.append("waiting for other ranks from sending, as there is one rank's trace: the wire may be better")
    unknown = sum(trace.unknown for trace in traces)
    if unknown:
        fit.untold.append(f"the bytes of {unknown} all-to-alls, as the profiler ran without record_shapes=True")
    _fit_wire(fit, exchanges)
    _fit_products(fit, [products for trace in traces for products in trace.products])
    return fit


def shortest(exchanges: Iterable[Exchange]) -> list[tuple[float, int, float]]:
    """Return bytes, peers and microseconds of each collective: the most that a rank sends, the shortest wait."""
    sides: defaultdict[tuple, list[Exchange]] = defaultdict(list)
    for exchange in exchanges:
        sides[exchange.key].append(exchange)
    return [
        (
            max(e.sent_bytes for e in collective),
            max(e.peers for e in collective),
            min(e.stop - e.start for e in collective),
        )
        for collective in sides.values()
        if any(e.peers for e in collective)
    ]


def _fit_wire(fit: Fit, exchanges: Sequence[tuple[float, int, float]]) -> None:
    if not exchanges:
        fit.untold.append("anything of the wire, as no all-to-all of Muon has both a size and a time")
        return
    sent, peers, times = np.array(exchanges, float).T
    solved = _share_of_bytes_and_peers(np.stack([sent, peers], axis=1), times)
    (byte, latency), errors = solved.solution, solved.errors
    fit.lines.append(
        f"{len(exchanges)} all-to-alls, of {sent.min() / 2**20:.3g} to {sent.max() / 2**20:.3g} MiB a rank, to "
        f"{_range(peers)} peers, in {times.min() / 1e3:.3g} to {times.max() / 1e3:.3g} ms; "
        f"the fit is off by {solved.spread:.0%} of the time (root mean square)"
    )
    if not solved.told_apart:
        fit.untold.append(
            "rate from latency, as messages have too few sizes; what is given is for an assumed latency of "
            f"{latency:g} µs a peer, with none it were {1e-3 * _ratio(sent, times):.4g} GB/s"
        )
    if byte > 0:
        _say(fit, "link_gb_per_s", 1e-3 / byte, errors[0] / byte, "GB/s a rank, one way")
    else:
        fit.untold.append("the rate, as times do not grow with the bytes")
    if solved.told_apart and latency > 0:
        _say(fit, "microseconds_per_peer", latency, errors[1] / latency, "µs for each peer")
    elif solved.told_apart:
        fit.untold.append("the latency of a peer, which is less than the errors of the times")


class _Solved(NamedTuple):
    solution: np.ndarray  # microseconds of a byte and of a peer
    errors: np.ndarray  # standard errors
    spread: float
    told_apart: bool


def _share_of_bytes_and_peers(amounts: np.ndarray, times: np.ndarray) -> _Solved:
    """Return the times of a byte and of a peer, both at least 0, by least squares of relative errors.

    If they cannot be separated, a peer has the assumed latency.
    """
    weights, told = 1 / times, True
    for _ in range(ROUNDS):
        columns, wanted = amounts * weights[:, None], times * weights
        told = len(times) > 2 and _sine(columns) > TOLD_APART
        solution = _nonnegative(columns, wanted, None if told else ASSUMED.microseconds_per_peer)
        fitted = amounts @ solution
        weights = 1 / np.maximum(fitted, times.min())
    free = (solution > 0) & [True, told]
    residue = columns @ solution - wanted
    variance = residue @ residue / max(len(times) - free.sum(), 1)
    errors = np.zeros(2)
    errors[free] = np.sqrt(variance * np.diag(np.linalg.inv(columns[:, free].T @ columns[:, free])))
    return _Solved(solution, errors, float(np.sqrt(np.mean(residue**2))), told)


def _nonnegative(columns: np.ndarray, wanted: np.ndarray, latency: float | None) -> np.ndarray:
    """Return the least squares solution, with this latency if it is given; else with no negative number."""
    if latency is None:
        solution = np.linalg.lstsq(columns, wanted, rcond=None)[0]
        if (solution > 0).all():
            return solution
        if solution[0] <= 0:
            return np.array([0.0, _ratio(wanted, columns[:, 1])])
        latency = 0.0
    byte = columns[:, 0] @ (wanted - latency * columns[:, 1]) / (columns[:, 0] @ columns[:, 0])
    return np.array([max(float(byte), 0.0), latency])


def _sine(columns: np.ndarray) -> float:
    """Return the sine of the angle between two columns. Errors grow by its inverse."""
    (a, b), norms = columns.T, np.linalg.norm(columns, axis=0)
    return float(np.sqrt(max(1 - (a @ b / norms.prod()) ** 2, 0)))


def _fit_products(fit: Fit, products: Sequence[Products]) -> None:
    if not products:
        fit.untold.append("the rate of the products, as no range `muon.orthogonalize` with FLOPs is there")
        return
    flop, times = np.array(products, float).T
    rate = _ratio(flop, times)  # FLOP a microsecond
    off = flop / rate / times - 1
    spread = float(np.sqrt(np.mean(off**2)))
    fit.lines.append(
        f"{len(products)} times products, of {flop.min() / 1e12:.3g} to {flop.max() / 1e12:.3g} TFLOP; the fit is off "
        f"by {spread:.0%} of the time (root mean square)"
    )
    _say(fit, "tflop_per_s", rate / 1e6, spread / np.sqrt(len(products)), "TFLOP/s of the products")


def _say(fit: Fit, name: str, value: float, relative_error: float, unit: str) -> None:
    fit.constants[name], fit.errors[name] = float(value), float(value * relative_error)
    fit.lines.append(f"  {value:.4g} ± {value * relative_error:.2g} {unit}")


def _ratio(values: np.ndarray, others: np.ndarray) -> float:
    return float(values.sum() / others.sum())


def _range(numbers: np.ndarray) -> str:
    low, high = int(numbers.min()), int(numbers.max())
    return f"{low}" if low == high else f"{low} to {high}"


if __name__ == "__main__":
    main()
