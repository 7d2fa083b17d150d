"""Other implementations are found where they lie, and one that is missing or fails leaves the rest to be compared."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import orthogonalizers, peers
from benchmarks.built_kernel import load_built


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

    made, marks = peers.admit(["ours", "absent", "broken"], "ours", make)
    assert made == {"ours": "ours"}
    assert marks == {"absent": "not installed", "broken": "failed: RuntimeError: out of memory"}
    with pytest.raises(RuntimeError):
        peers.admit(["broken"], "broken", make)


@pytest.fixture
def brought_along(tmp_path, monkeypatch):
    """Sources of two peers in a folder: their functions note the sizes that they are given; the packages are broken."""
    noted = "sizes = []\ndef {}(G, option):\n    sizes.append(tuple(G.shape))\n    return G\n"
    functions = {"flash_muon/muon.py": "fast_newtonschulz", "dion/newton_schulz_triton.py": "newton_schulz_triton"}
    for file, function in functions.items():
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(noted.format(function))
        (tmp_path / file).with_name("__init__.py").write_text("import nowhere")
    monkeypatch.setattr(sys, "path", list(sys.path))
    peers.add_folder(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("flash_muon", "dion")]:
        del sys.modules[name]


def task_on(built, device: str) -> orthogonalizers.Task:
    return orthogonalizers.Task(built, torch.device(device), (), (), "default")


@pytest.mark.parametrize("name", ["flash-muon", "dion"])
def test_peer_that_is_not_brought_along_is_not_installed(built, name):
    with pytest.raises(peers.MissingError, match=r"^not installed$"):
        orthogonalizers.find_contestant(name, task_on(built, "cuda"))


@pytest.mark.parametrize("name, given", [("flash-muon", [(3, 5), (3, 5)]), ("dion", [(2, 3, 5)])])
def test_peer_is_found_in_the_folder_that_is_brought_along(built, brought_along, name, given):
    """flash-muon takes one matrix at a time."""
    with pytest.raises(peers.MissingError, match="needs a GPU"):
        orthogonalizers.find_contestant(name, task_on(built, "cpu"))
    contestant = orthogonalizers.find_contestant(name, task_on(built, "cuda"))
    assert len(contestant.run(torch.ones(2, 3, 5))) == 2 and len(contestant.schedule) == orthogonalizers.STEPS
    assert sys.modules[peers.MODULES[name]].sizes == given
