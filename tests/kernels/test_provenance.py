"""The package says which build it is, whatever way it was loaded, and states keep the build that saved them."""

import copy
import dataclasses
import hashlib
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from tests.support.small_model import named_parameters, same_bits, serialized, take_steps

METADATA = {
    "name": "optimizer",
    "id": "_optimizer_cpu_632c632",
    "version": 3,
    "provenance": {"kernel-builder": {"version": "0.17.2"}, "kernel": {"commit": "a" * 40, "dirty": True}},
}


def build_info_in(kernel, folder: Path, metadata: dict | None, library: bool):
    """Return `build_info` of a folder with this metadata.json, copies of the modules, and perhaps a library."""
    code = Path(kernel.__file__).with_name("kernels")
    (folder / "kernels").mkdir(parents=True)
    (folder / "kernels/__init__.py").touch()
    for name in ("build_metadata.py", "provenance.py"):
        shutil.copy(code / name, folder / "kernels")
    if metadata is not None:
        (folder / "metadata.json").write_text(json.dumps(metadata))
    if library:
        (folder / "_ops.abi3.so").touch()
    spec = importlib.util.spec_from_file_location("sources", folder / "kernels/__init__.py")
    sys.modules["sources"] = importlib.util.module_from_spec(spec)
    try:
        return importlib.import_module("sources.provenance").build_info()
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sources"]:
            del sys.modules[name]


@pytest.mark.kernels_ci
def test_a_build_says_what_its_metadata_says(kernel):
    folder = Path(kernel.__file__).parent
    content = (folder / "metadata.json").read_bytes()
    metadata, build = json.loads(content), kernel.build_info()
    assert (build.variant, build.id, build.version) == (folder.name, metadata["id"], metadata["version"])
    assert build.pin == hashlib.sha256(content).hexdigest()
    assert build.kind == ("compiled" if list(folder.glob("*.so")) else "portable")
    with pytest.raises(dataclasses.FrozenInstanceError):
        build.pin = "0" * 64


@pytest.mark.parametrize("library, kind", [(True, "compiled"), (False, "portable")])
def test_fields_are_those_of_the_file_and_the_folder(kernel, tmp_path, library, kind):
    build = build_info_in(kernel, tmp_path / "torch-cpu", METADATA, library)
    pin = hashlib.sha256((tmp_path / "torch-cpu/metadata.json").read_bytes()).hexdigest()
    expected = ("torch-cpu", "_optimizer_cpu_632c632", 3, "a" * 40, True, "0.17.2", pin, kind)
    assert dataclasses.astuple(build) == expected
    assert str(build) == f"torch-cpu, version 3, commit {'a' * 40} with changes, pin {pin}"


def test_a_builder_may_say_nothing_about_the_sources(kernel, tmp_path):
    metadata = {key: value for key, value in METADATA.items() if key != "provenance"}
    build = build_info_in(kernel, tmp_path / "torch-cpu", metadata, library=True)
    assert (build.commit, build.dirty, build.builder, build.version) == (None, None, None, 3)
    assert "an unknown commit" in str(build)


def test_a_tree_of_sources_is_an_unknown_build(kernel, tmp_path):
    build = build_info_in(kernel, tmp_path / "optimizer", None, library=False)
    assert set(dataclasses.astuple(build)) == {None}
    assert str(build) == "an unknown build"


def test_a_saved_state_names_its_build(kernel):
    optimizer = kernel.Muon(named_parameters().items())
    saved = serialized(optimizer.state_dict())  # by torch.load(weights_only=True)
    assert {group["build"] for group in saved["param_groups"]} == {str(kernel.build_info())}


@pytest.mark.parametrize("writer", ["of somebody else", None, {"pin": 1}, "left out"])
def test_a_state_of_any_build_loads_and_the_next_file_names_this_one(kernel, writer):
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), lr=0.02)
    take_steps(optimizer, params, [0])
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        group["build"] = writer
        if writer == "left out":
            del group["build"]
    others = {name: torch.nn.Parameter(p.detach().clone()) for name, p in params.items()}
    other = kernel.Muon(others.items())
    other.load_state_dict(saved)
    assert {group["build"] for group in other.state_dict()["param_groups"]} == {str(kernel.build_info())}
    take_steps(optimizer, params, [1])
    take_steps(other, others, [1])
    assert same_bits(params, others)


def test_a_distributed_checkpoint_names_the_build_that_saved_it(kernel, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    optimizer = kernel.Muon(model.named_parameters())
    for group in optimizer.param_groups:
        group["build"] = "of somebody else"
    dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path, no_dist=True)
    other = kernel.Muon(model.named_parameters())
    state = {"optim": get_optimizer_state_dict(model, other)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert {group["build"] for group in state["optim"]["param_groups"]} == {"of somebody else"}
    set_optimizer_state_dict(model, other, state["optim"])
    assert {group["build"] for group in other.param_groups} == {str(kernel.build_info())}
