"""The same step launched in different ways: kernel by kernel, as CUDA graphs, and compiled.

Beside the step that is captured whole, in which the host has no part, is what the model of products predicts for it
with each kind of product (`benchmarks.predicted_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from unittest import mock

import torch
from torch.optim import _muon

from benchmarks import peers
from benchmarks.fake_gpu import GPU
from benchmarks.predicted_step import PREDICTED, predicted_step
from benchmarks.result_file import LOST
from benchmarks.shapes import MODELS, TINY_MODEL, Parameter
from benchmarks.step_rivals import ADAMW, OURS, WARMED_UP, Weights, build_ours, find_rival, make_weights, step_of
from benchmarks.timing import replayed, take_turns
from tests.support.proofs import race
from tools.lab.environment import copied_in_a_second
from tools.lab.items import FailedError, Lab
from tools.lab.records import FILE, read

TORCH_MUON = "torch.optim.Muon"
CAPTURED = f"{OURS}, whole step captured"


def key_of(model: str) -> str:
    return f"ways of a step, {model}"


def compare_ways(lab: Lab, model: str) -> dict:
    """Return a row for each way to take a step over a model's parameters: milliseconds, their spread, predictions.

    A way that cannot be taken has a mark instead. As in the sweeps, warming up measures nothing: the lab tunes before.
    Raises FailedError from the loss of the GPU; in later runs the way that has lost it is not taken, and has a mark.
    If it is one of ours, those raise FailedError with the rows.
    """
    parameters = TINY_MODEL if lab.tiny else MODELS[model]
    made, lost = ways(lab, parameters), lost_before(lab, model)
    try:
        works, marks = peers.admit(made, lambda name: after_first(made[name]()), lost)
        times = dict(zip(works, take_turns(list(works.values()), lab.device, lab.rounds, list(works))))
    except race.LostGpuError as error:
        lost[error.name] = f"lost the GPU: {' '.join(error.why.split())}"
        raise FailedError(str(error), {LOST: lost}) from error
    predicted = predicted_times(lab, parameters)
    rows = [row_of(name, times.get(name), marks.get(name)) | dict.fromkeys(predicted) for name in made]
    next(row for row in rows if row["step of"] == CAPTURED).update(predicted)
    content = {"results": rows, **({LOST: lost} if lost else {})}
    for name in filter(peers.is_ours, lost):
        raise FailedError(f"{name}: {lost[name]}", content)
    return content


def lost_before(lab: Lab, model: str) -> dict[str, str]:
    """Return the marks of the ways that have lost the GPU in earlier runs."""
    values = (record.value for record in read(lab.out / FILE)[1] if record.key == key_of(model))
    return dict((next(values, None) or {}).get(LOST, {}))


def row_of(name: str, time: tuple[float, float] | None, mark: str | None) -> dict:
    """Return the row of a way with its seconds and their spread, or with a mark that says why there are none."""
    seconds, spread = time or (None, None)
    return {"step of": name, "milliseconds": 1e3 * seconds if time else mark, "spread": spread}


def predicted_times(lab: Lab, parameters: Sequence[Parameter]) -> dict[str, float | None]:
    """Return the predicted milliseconds of a step by heading.

    Each is None on GPUs that differ from the model's in more than their rate of copies, and where that was not timed.
    """
    gpu, copied = lab.kernel.kernels.speeds.machine.gpu_of(lab.device), copied_in_a_second(lab)
    headings = {way: f"predicted milliseconds, {way}" for way in PREDICTED}
    if gpu is None or copied is None or (gpu.capability, gpu.multiprocessors) != GPU[:2]:
        return dict.fromkeys(headings.values())
    return {heading: 1e3 * predicted_step(lab.kernel, parameters, way, copied) for way, heading in headings.items()}


def ways(lab: Lab, parameters: Sequence[Parameter]) -> dict[str, Callable[[], Callable[[], object]]]:
    """Return what makes each step, by name. All move the same parameters, so that large models fit beside each other.

    Without a GPU there are no graphs: what would be captured whole runs as it is.
    """
    weights = make_weights(parameters, lab.device)
    return {
        OURS: partial(rival_step, lab, OURS, weights),
        WARMED_UP: partial(rival_step, lab, WARMED_UP, weights),
        CAPTURED: lambda: replayed([step_of(build_ours(lab.kernel, weights, capturable=True))], lab.device),
        TORCH_MUON: partial(rival_step, lab, TORCH_MUON, weights),
        f"{TORCH_MUON}, its iteration compiled": partial(compiled_torchs, lab, weights),
        f"{ADAMW}, fused": partial(rival_step, lab, ADAMW, weights),
    }


def after_first(step: Callable[[], object]) -> Callable[[], object]:
    """Take a step, which makes state and compiles, and return it."""
    step()
    return step


def compiled_torchs(lab: Lab, weights: Weights) -> Callable[[], None]:
    """Return a step of torch's Muon with its iteration compiled."""
    compiled = torch.compile(_muon._zeropower_via_newtonschulz, backend="eager" if lab.tiny else "inductor")
    torchs = rival_step(lab, TORCH_MUON, weights)

    def step() -> None:
        with mock.patch.object(_muon, "_zeropower_via_newtonschulz", compiled):
            torchs()

    return step


def rival_step(lab: Lab, name: str, weights: Weights) -> Callable[[], None]:
    return step_of(find_rival(name, lab.kernel, lab.device).build(weights))
