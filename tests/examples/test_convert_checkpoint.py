"""A converted checkpoint is what import_state makes in process, bit for bit, and what does not fit is not written."""

import argparse
import json

import pytest
import torch

from examples import convert_checkpoint
from tests.support.published_muons import CASES
from tests.support.small_model import named_parameters, same_bits, take_steps

SETTINGS = dict(ns_coefficients="quintic")


def written(folder, case):
    """Files of a published optimizer's state and of the model, as the arguments that name them."""
    _, state_dict, source, others, _ = CASES[case]()
    torch.save({"epoch": 3, "optimizers": [state_dict]}, folder / "old.pt")
    shapes = {name: list(p.shape) for name, p in named_parameters().items()}
    (folder / "parameters.json").write_text(json.dumps(shapes))
    arguments = [f"{folder}/old.pt", "--key", "optimizers.0", "--from", source, "--output", f"{folder}/new.pt"]
    if "adamw_state_dict" in others:
        torch.save(others["adamw_state_dict"], folder / "adamw.pt")
        arguments += ["--adamw", f"{folder}/adamw.pt"]
    return arguments


@pytest.mark.parametrize(
    "case", ["torch", "timm", "keller_jordan", "motif", "moonlight", "dion", "dion with second moments"]
)
def test_a_converted_checkpoint_goes_on_as_an_import_in_process(kernel, tmp_path, capsys, case):
    arguments = [*written(tmp_path, case), "--model", f"{tmp_path}/parameters.json", "--settings", json.dumps(SETTINGS)]
    convert_checkpoint.main(arguments, kernel)
    _, state_dict, source, others, _ = CASES[case]()
    params = named_parameters()
    imported = kernel.Muon(params.items(), **SETTINGS)
    notes = kernel.import_state(imported, state_dict, source, **others)
    again = named_parameters()
    resumed = kernel.Muon(again.items())
    resumed.load_state_dict(torch.load(tmp_path / "new.pt", weights_only=True))
    take_steps(imported, params, [0, 1])
    take_steps(resumed, again, [0, 1])
    assert same_bits(params, again)
    assert not same_bits(params, named_parameters())
    printed = capsys.readouterr().out
    assert all(f"not taken over: {note}\n" in printed for note in notes) and "for 5 parameters" in printed


def test_a_models_state_dict_stands_for_names_and_shapes(kernel, tmp_path):
    arguments = written(tmp_path, "timm")
    torch.save({name: p.detach() for name, p in named_parameters().items()}, tmp_path / "model.pt")
    for model in ("parameters.json", "model.pt"):
        output = ["--output", f"{tmp_path}/{model}.new"]
        convert_checkpoint.main([*arguments, "--model", f"{tmp_path}/{model}", *output], kernel)
    first, second = (torch.load(tmp_path / f"{model}.new")["state"] for model in ("parameters.json", "model.pt"))
    assert all(torch.equal(first[i][key], second[i][key]) for i in first for key in first[i])


def test_names_of_muons_parameters_and_their_order_can_be_given(kernel, tmp_path):
    """The embedding is Muon's in this file, which has the model's parameters in another order."""
    arguments = written(tmp_path, "timm")
    _, state_dict, _, _, _ = CASES["timm"]()
    state_dict["state"][0] = {"momentum_buffer": torch.ones(40, 12), "use_muon": True}
    torch.save(state_dict, tmp_path / "old.pt")
    (tmp_path / "order.json").write_text(json.dumps(list(named_parameters())))
    model = ["--key", "", "--model", f"{tmp_path}/parameters.json"]
    with pytest.raises(SystemExit, match=r"wte\.weight belongs to muon in the source, and to adamw here"):
        convert_checkpoint.main([*arguments, *model, "--order", f"{tmp_path}/order.json"], kernel)
    assert not (tmp_path / "new.pt").exists()
    chosen = ["--muon", "wte.*", "up.weight", "down.*"]
    convert_checkpoint.main([*arguments, *model, "--order", f"{tmp_path}/order.json", *chosen], kernel)
    opt = kernel.Muon(named_parameters().items(), is_muon=lambda name, p: p.ndim == 2)
    opt.load_state_dict(torch.load(tmp_path / "new.pt", weights_only=True))
    (group,) = (group for group in opt.param_groups if "wte.weight" in group["param_names"])
    assert group["use_muon"] and opt.state[group["params"][0]]["momentum_buffer"].eq(1).all()


@pytest.mark.parametrize(
    "changed, words",
    [
        (["--from", "adam"], "source must be one of"),
        (["--key", "optimizers.1"], "has nothing under optimizers.1"),
        (["--key", "epoch"], "no dict under epoch, got int"),
        (["--model", "weights.safetensors"], "keeps no order"),
        (["--settings", '{"lr": -1}'], "lr must be at least 0"),
        (["--model", "nowhere.json"], "No such file or directory: 'nowhere.json'"),
        (["--adamw", "nowhere.pt"], "No such file or directory: 'nowhere.pt'"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_said_and_not_written(kernel, tmp_path, changed, words):
    arguments = [*written(tmp_path, "timm"), "--model", f"{tmp_path}/parameters.json"]
    with pytest.raises(SystemExit, match=words):
        convert_checkpoint.main([*arguments, *changed], kernel)
    assert not (tmp_path / "new.pt").exists()


@pytest.mark.parametrize(
    "content, words",
    [(argparse.Namespace(lr=0.1), "Weights only load failed"), (None, "old.pt without running code: .+")],
    ids=["of other classes", "no checkpoint"],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_line(kernel, tmp_path, content, words):
    """A checkpoint with the arguments of a script in it needs `weights_only=False`, which runs what the file says."""
    arguments = [*written(tmp_path, "timm"), "--model", f"{tmp_path}/parameters.json"]
    if content is None:
        (tmp_path / "old.pt").write_bytes(b"nothing")
    else:
        torch.save({**torch.load(tmp_path / "old.pt"), "args": content}, tmp_path / "old.pt")
    with pytest.raises(SystemExit, match=words) as refused:
        convert_checkpoint.main(arguments, kernel)
    assert "\n" not in str(refused.value) and not (tmp_path / "new.pt").exists()


def test_another_model_is_refused(kernel, tmp_path):
    arguments = written(tmp_path, "timm")
    shapes = {name: [2 * size for size in p.shape] for name, p in named_parameters().items()}
    (tmp_path / "other.json").write_text(json.dumps(shapes))
    with pytest.raises(SystemExit, match=r"up.weight is \(48, 24\) here, its momentum_buffer in the source \(24, 12\)"):
        convert_checkpoint.main([*arguments, "--model", f"{tmp_path}/other.json"], kernel)
    assert not (tmp_path / "new.pt").exists()
