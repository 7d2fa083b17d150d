"""Other implementations are found where they lie, and one that is missing or fails leaves the rest to be compared."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import orthogonalizers, peers
from benchmarks.built_kernel import load_built
from benchmarks.shapes import TINY_MODEL
from benchmarks.step_rivals import find_rival, make_weights


@pytest.fixture(scope="module")
def built(variant):
    """The kernel as the sweeps load it."""
    return load_built(variant.parent)[0]


def test_failing_peer_is_marked_but_our_failure_raises():
    def make(name: str) -> str:
        if name == "absent":
            raise peers.MissingError("not installed")
        if name == "broken":
            raise RuntimeError("out of memory")
        return name

    def fail(name: str) -> None:
        raise RuntimeError("out of memory")

    made, marks = peers.admit([peers.OURS, "absent", "broken"], make, {})
    assert made == {peers.OURS: peers.OURS}
    assert marks == {"absent": "not installed", "broken": "failed: RuntimeError: out of memory"}
    with pytest.raises(RuntimeError):
        peers.admit([peers.OURS], fail, {})


@pytest.fixture
def brought_along(tmp_path, monkeypatch):
    """Sources of two peers in a folder: their functions note the sizes that they are given; the packages are broken."""
    noted = "sizes = []\ndef {}(G, option):\n    sizes.append(tuple(G.shape))\n    return G\n"
    functions = {"flash_muon/muon.py": "fast_newtonschulz", "dion/newton_schulz_triton.py": "newton_schulz_triton"}
    for file, function in functions.items():
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(noted.format(function))
        (tmp_path / file).with_name("__init__.py").write_text("import nowhere")
    (tmp_path / "dion/muon.py").write_text("from torch.optim import SGD as Muon\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    peers.add_folder(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("flash_muon", "dion")]:
        del sys.modules[name]


def test_dion_steps_matrices_and_other_parameters(built, brought_along, monkeypatch):
    """What it is given stands in an SGD that takes every argument."""
    arguments = {}

    class Muon(torch.optim.SGD):
        def __init__(self, groups, lr, **settings):
            super().__init__(groups, lr)
            arguments.update(settings)

    with pytest.raises(peers.MissingError, match=r"^needs a GPU$"):
        find_rival("dion", built, torch.device("cpu"))
    monkeypatch.setattr(peers.load_peer("dion", "dion.muon"), "Muon", Muon)
    weights = make_weights(TINY_MODEL, torch.device("cpu"))
    (optimizer,) = find_rival("dion", built, torch.device("cuda")).build(weights)
    matrices, rest = optimizer.param_groups
    assert matrices["params"] == weights.matrices and "algorithm" not in matrices
    assert rest["params"] == weights.rest and rest["algorithm"] == "adamw"
    assert arguments["mu"] == 0.95 and arguments["weight_decay"] == 0.1 and arguments["use_triton"]


def task_on(built, device: str) -> orthogonalizers.Task:
    return orthogonalizers.Task(built, torch.device(device), (), (), "default")


@pytest.mark.parametrize("name", ["flash-muon", "dion"])
def test_peer_that_is_not_brought_along_is_not_installed(built, name):
    with pytest.raises(peers.MissingError, match=r"^not installed$"):
        orthogonalizers.find_contestant(name, task_on(built, "cuda"))


@pytest.mark.parametrize("name, sizes", [("flash-muon", [(3, 5), (3, 5)]), ("dion", [(2, 3, 5)])])
def test_peer_is_found_in_the_folder_that_is_brought_along(built, brought_along, name, sizes):
    """flash-muon takes one matrix at a time."""
    with pytest.raises(peers.MissingError, match="needs a GPU"):
        orthogonalizers.find_contestant(name, task_on(built, "cpu"))
    contestant = orthogonalizers.find_contestant(name, task_on(built, "cuda"))
    assert len(contestant.run(torch.ones(2, 3, 5))) == 2 and len(contestant.schedule) == orthogonalizers.STEPS
    assert sys.modules[peers.MODULES[name]].sizes == sizes
