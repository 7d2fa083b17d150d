"""State that older code has saved loads with all its bits, and training continues as that code would have continued.

The files are what `tools/release/saved_states.py` wrote with builds of those commits, never of today's code.
"""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import Parameter

from tests.support.saved_states import CASES, COMMON, SHAPES, plain, restored, take_step
from tests.support.small_model import same_bits, serialized

pytestmark = pytest.mark.kernels_ci

STATES = Path(__file__).resolve().parents[1] / "golden" / "states"
SAVED = {file.stem: json.loads(file.read_text())["cases"] for file in sorted(STATES.glob("*.json"))}


def continued(kernel, case, saved, **changes):
    """Return today's optimizer with the saved parameters and state, and these parameters."""
    params = {name: Parameter(value) for name, value in saved["parameters"].items()}
    optimizer = kernel.Muon(params.items(), **{**COMMON, **CASES[case], **changes})
    optimizer.load_state_dict(serialized(saved["state_dict"]))
    return optimizer, params


def tolerance(kernel):
    """Return by how much values after a step may differ between processors, which sum products in other orders.

    The iteration amplifies a rounding by at most its gain, the product of all `a`. An update of a matrix is `lr` times
    its multiplier, at most 0.2 sqrt(72) here, times the result. Of AdamW's and of all other roundings there are less
    than eight, each of a number below 4.
    """
    gain = math.prod(a for a, _, _ in kernel.polar_express())
    return (COMMON["lr"] * 0.2 * math.sqrt(max(map(max, SHAPES.values()))) * gain + 8 * 4) * 2**-24


@pytest.mark.parametrize("file, case", [(file, case) for file, cases in SAVED.items() for case in cases])
def test_state_of_an_older_version_loads_and_continues_as_there(kernel, file, case):
    saved = restored(SAVED[file][case])
    optimizer, params = continued(kernel, case, saved, lr=1.0)
    loaded = optimizer.state_dict()["state"]
    assert loaded.keys() == saved["state_dict"]["state"].keys()
    assert all(same_bits(loaded[i], state) for i, state in saved["state_dict"]["state"].items())
    after = take_step(optimizer, params, saved["gradients"])
    torch.testing.assert_close(after, saved["after"], atol=tolerance(kernel), rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_without_its_state_training_would_continue_otherwise(kernel, case):
    """So the tolerance hides no state that is not loaded."""
    saved = restored(SAVED["format-2"][case])
    params = {name: Parameter(value) for name, value in saved["parameters"].items()}
    after = take_step(kernel.Muon(params.items(), **COMMON, **CASES[case]), params, saved["gradients"])
    assert all((after[name] - saved["after"][name]).abs().max() > 100 * tolerance(kernel) for name in params)


def test_there_is_a_file_of_each_format_with_every_case(kernel):
    newest = kernel.parameters.state.STATE_FORMAT
    assert {f"format-{number}" for number in range(1, newest + 1)} <= SAVED.keys()
    for file, cases in SAVED.items():
        groups = [group for case in cases.values() for group in restored(case)["state_dict"]["param_groups"]]
        assert {f"format-{group['state_format']}" for group in groups} <= {file, file.rpartition("-")[0]}
        assert cases.keys() == CASES.keys() or file == "format-1-first"


def test_values_survive_json():
    value = {"a": [1, (None, "b")], 3: torch.tensor([[1, -2]], dtype=torch.int8), "c": torch.tensor(0.1).bfloat16()}
    copy = restored(json.loads(json.dumps(plain(value))))
    assert copy["a"] == value["a"] and type(copy["a"][1]) is tuple and copy.keys() == value.keys()
    assert same_bits({key: copy[key] for key in (3, "c")}, {key: value[key] for key in (3, "c")})


def test_a_distributed_checkpoint_without_a_newer_key_is_loaded_in_part(kernel, tmp_path):
    """As docs/distributed.md says. A release that did not know `stacked` has written this one."""
    model = torch.nn.Linear(8, 6)
    optimizer = kernel.Muon(model.named_parameters(), lr=0.02)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer)
    for group in saved["param_groups"]:
        del group["stacked"]
    dcp.save({"optimizer": saved}, checkpoint_id=tmp_path, no_dist=True)

    other = kernel.Muon(model.named_parameters(), lr=0.5)
    target = {"optimizer": get_optimizer_state_dict(model, other)}
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict"):
        dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    dcp.load(target, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True), no_dist=True)
    set_optimizer_state_dict(model, other, target["optimizer"])
    (momentum, loaded) = (each.state[model.weight]["momentum_buffer"] for each in (optimizer, other))
    assert torch.equal(loaded, momentum) and {group["lr"] for group in other.param_groups} == {0.02}
