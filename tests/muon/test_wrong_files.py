"""What people load by mistake: each file is answered by what it has, what is needed, and what to write instead."""

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import named_parameters, take_steps


def weight(*shape):
    return Parameter(torch.ones(shape or (8, 8)))


def saved(kernel, params, **settings):
    optimizer = kernel.Muon(params.items() if isinstance(params, dict) else params, **settings)
    if isinstance(params, dict):
        take_steps(optimizer, params, [0])
    return optimizer.state_dict()


def resized(kernel):
    params = named_parameters()
    state_dict = saved(kernel, params)
    params["wte.weight"] = weight(44, 12)
    kernel.Muon(params.items()).load_state_dict(state_dict)


def resized_later(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    params["wte.weight"].data = torch.ones(44, 12)
    take_steps(optimizer, params, [0])


def later_format(kernel):
    params = named_parameters()
    state_dict = saved(kernel, params)
    for group in state_dict["param_groups"]:
        group["state_format"] = 99
    kernel.Muon(params.items()).load_state_dict(state_dict)


def torchs(optimizer_class, params, **settings):
    optimizer = optimizer_class(params, **settings)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer.state_dict()


def reordered(kernel):
    params = named_parameters()
    order = "wte.weight", "down.weight", "up.bias", "up.weight", "norm.weight"
    kernel.Muon((name, params[name]) for name in order).load_state_dict(saved(kernel, params))


def without_one(kernel):
    params = named_parameters()
    state_dict = saved(kernel, params)
    params["new.bias"] = params.pop("up.bias")
    params["other.bias"] = weight(4)
    kernel.Muon(params.items()).load_state_dict(state_dict)


def with_keys_of_json(kernel):
    params = named_parameters()
    state_dict = saved(kernel, params)
    return {**state_dict, "state": {str(number): each for number, each in state_dict["state"].items()}}


def with_groups(kernel, **entries):
    state_dict = saved(kernel, named_parameters())
    return {**state_dict, "param_groups": [{**group, **entries} for group in state_dict["param_groups"]]}


def loads(kernel, state_dict):
    kernel.Muon(named_parameters().items()).load_state_dict(state_dict)


FILES = {
    "a path": (lambda k: loads(k, "optimizer.pt"), TypeError, r"got str: write torch\.load\(path\)"),
    "an optimizer": (
        lambda k: loads(k, k.Muon([weight()])),
        TypeError,
        r"got Muon: write .*optimizer\.state_dict\(\) for an opt",
    ),
    "a whole checkpoint": (
        lambda k: loads(k, {"model": 1}),
        ValueError,
        "with the keys state and param_groups, got the keys model: of a whole checkpoint, give",
    ),
    "an empty dict": (lambda k: loads(k, {}), ValueError, "got no keys: of a whole check"),
    "AdamW's": (
        lambda k: loads(k, torchs(torch.optim.AdamW, list(named_parameters().values()))),
        ValueError,
        r"import_state\(optimizer, state_dict, source='adamw'\)",
    ),
    "torch's Muon's": (
        lambda k: loads(k, torchs(torch.optim.Muon, [weight()])),
        ValueError,
        r"1 groups of 1 .*2 groups of 2, 3 .*source='torch'",
    ),
    "SGD's": (
        lambda k: loads(k, torchs(torch.optim.SGD, [weight()], lr=1, momentum=0.9)),
        ValueError,
        "start with a new",
    ),
    "AdamW's as torch's Muon's": (
        lambda k: k.import_state(k.Muon([weight()]), torchs(torch.optim.AdamW, [weight()])),
        ValueError,
        "not saved by source='torch': .*source='adamw'",
    ),
    "SGD's as torch's Muon's": (
        lambda k: k.import_state(k.Muon([weight()]), torchs(torch.optim.SGD, [weight()], lr=1, momentum=0.9)),
        ValueError,
        "not saved by source='torch'",
    ),
    "named for an unnamed": (
        lambda k: k.Muon(named_parameters().values()).load_state_dict(saved(k, named_parameters())),
        ValueError,
        r"saved with names, and these .* write Muon\(model\.named_parameters\(\)\)",
    ),
    "unnamed for a named": (
        lambda k: loads(k, saved(k, list(named_parameters().values()))),
        ValueError,
        r"saved without names.*Write Muon\(model\.parameters\(\)\)",
    ),
    "in another order": (
        reordered,
        ValueError,
        r"another order: (up|down)\.weight was parameter \d of group 0, and is",
    ),
    "of other parameters": (
        without_one,
        ValueError,
        "only the state has up.bias; only the optimizer has new.bias, other.bi",
    ),
    "of an embedding since resized": (
        resized,
        ValueError,
        r"of wte\.weight has shape \(40, 12\), needs \(44, 12\).*state_dict\[\"state\"\]\.pop\(2\)",
    ),
    "resized after construction": (resized_later, ValueError, r"wte\.weight has shape .*del optimizer\.state\[p\]"),
    "of the other branch": (
        lambda k: k.Muon([weight()]).load_state_dict(k.Muon([{"params": [weight()], "use_muon": False}]).state_dict()),
        ValueError,
        "param_0, was saved for AdamW and belongs to Muon here: .* set use_muon in their group",
    ),
    "with the keys of JSON": (
        lambda k: loads(k, with_keys_of_json(k)),
        ValueError,
        r"state has the keys '0', '1', '2', and params of the groups are 0, 1, 2: none .* strings of numbers",
    ),
    "with a number for parameters": (
        lambda k: loads(k, with_groups(k, params=5)),
        TypeError,
        "params of a saved group must be a list, got 5",
    ),
    "with lists in lists": (
        lambda k: loads(k, with_groups(k, params=[[0], [1]])),
        TypeError,
        r"params of saved groups must be numbers or names, got \[\[0\], \[1\]",
    ),
    "without a list of names": (
        lambda k: loads(k, with_groups(k, param_names=None)),
        TypeError,
        "param_names of a saved group must be a list, got None",
    ),
    "with an unknown branch": (
        lambda k: loads(k, with_groups(k, use_muon="x")),
        TypeError,
        "use_muon of a saved group must be True or False, got 'x'",
    ),
    "of a later format": (
        later_format,
        ValueError,
        "saved in format 99, this version knows 1 to .* version of this package",
    ),
}


@pytest.mark.parametrize("mistake", FILES)
def test_a_wrong_file_is_answered_by_what_to_write(kernel, mistake):
    make, error, words = FILES[mistake]
    with pytest.raises(error, match=f"(?s){words}"):
        make(kernel)


def test_a_resized_embedding_begins_anew_as_the_message_says(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    take_steps(optimizer, params, [0])
    state_dict = optimizer.state_dict()
    params["wte.weight"] = weight(44, 12)
    other = kernel.Muon(params.items())
    state_dict["state"].pop(2)
    with pytest.warns(UserWarning, match="the file has no state of wte.weight: these parameters begin anew"):
        other.load_state_dict(state_dict)
    take_steps(other, params, [1])
    assert other.state[params["wte.weight"]]["step"] == 1 and other.state[params["up.bias"]]["step"] == 2


def test_state_that_a_frozen_parameter_lacks_is_not_missed(kernel, recwarn):
    """torch's `get_optimizer_state_dict` reads none, and no step uses it. A file without any state lacks none, too."""
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    state_dict = optimizer.state_dict()
    optimizer.load_state_dict({**state_dict, "state": {}})
    params["wte.weight"].requires_grad_(False)
    state_dict["state"].pop(2)
    optimizer.load_state_dict(state_dict)
    assert not recwarn.list


@pytest.mark.parametrize(
    "setting, key",
    [({"momentum_dtype": "int8"}, "momentum_scale"), ({"master_weights": "split"}, "remainder")],
    ids=str,
)
def test_a_part_of_the_state_that_a_loader_has_not_read_is_missed(kernel, setting, key):
    """torch.distributed.checkpoint reads the tensors that an optimizer has, and copies them in its dtypes."""
    params = [[("up.weight", torch.nn.Parameter(torch.ones(8, 64, dtype=torch.bfloat16)))] for _ in range(2)]
    saved = kernel.Muon(params[0], **setting).state_dict()
    state = saved["state"][0]
    del state[key]
    state["momentum_buffer"] = state["momentum_buffer"].bfloat16()
    other = kernel.Muon(params[1])
    with pytest.raises(ValueError, match=f"was saved with {next(iter(setting))}=.* Construct the optimizer with"):
        other.load_state_dict(saved)


def test_a_part_that_a_parameter_never_had_is_not_missed(kernel):
    """Those in float32 have no lower half, and frozen ones no state."""

    def params() -> list:
        frozen = torch.nn.Parameter(torch.ones(8, 16, dtype=torch.bfloat16), requires_grad=False)
        return [("up.weight", torch.nn.Parameter(torch.ones(8, 16))), ("frozen.weight", frozen)]

    saved, other = kernel.Muon(params(), master_weights="split", lr=0.5).state_dict(), kernel.Muon(params())
    assert saved["state"].keys() == {0}
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.5
