"""What people give in place of parameters: an error says what was given, what is needed, and what to write instead."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from tests.muon.test_mistakes import weight


def step_with_sparse_gradients(kernel):
    model = nn.ModuleDict({"words": nn.Embedding(10, 8, sparse=True)})
    optimizer = kernel.Muon(model.named_parameters())
    model["words"](torch.tensor([1])).sum().backward()
    optimizer.step()


def made_under_inference_mode(kernel):
    model = nn.Linear(8, 8)
    with torch.inference_mode():
        kernel.Muon(model.named_parameters())


def of_a_model_made_under_inference_mode(kernel):
    with torch.inference_mode():
        model = nn.Linear(8, 8)
    kernel.Muon(model.named_parameters())


def of_fsdp1(kernel):
    p = weight(64)
    p._is_flat_param = True
    kernel.Muon([("flat", p)])


def tied_by_data(kernel):
    a, b = weight(), weight()
    b.data = a.data.mT
    kernel.Muon([("a", a), ("b", b)])


def view_inside_another(kernel):
    a = weight(12, 8)
    kernel.Muon([("a", a), ("b", Parameter(a.data[2:6]))])


def nested(layout):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        parts = [torch.ones(2, 3), torch.ones(4, 3)]
        return torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)


def read_twice(kernel):
    params = nn.Linear(8, 8).named_parameters()
    list(params)
    kernel.Muon(params)


PARAMETERS = {
    "a module": (
        lambda k: k.Muon(nn.Bilinear(2, 2, 2)),
        TypeError,
        r"module, Bilinear: write its named_parameters\(\)",
    ),
    "a Sequential": (lambda k: k.Muon(nn.Sequential(nn.Linear(2, 2))), TypeError, r"Sequential: write its named_p"),
    "modules": (lambda k: k.Muon([nn.Linear(2, 2)]), TypeError, "Linear at position 0: write named_parameters"),
    "a module in a group": (lambda k: k.Muon([{"params": nn.Linear(2, 2)}]), TypeError, "Linear: write its named_par"),
    "one tensor": (lambda k: k.Muon(weight()), TypeError, r"got Parameter: write .*\[parameter\] for a single one"),
    "a dict": (lambda k: k.Muon({"a": weight()}), TypeError, r"dict with the keys a: write its items\(\)"),
    "one group": (lambda k: k.Muon({"params": [weight()]}), TypeError, r"write \[group\], a list of groups"),
    "a string": (lambda k: k.Muon("model"), TypeError, r"got str: write model\.named_parameters\(\)"),
    "groups among tensors": (
        lambda k: k.Muon([weight(), {"params": [weight()]}]),
        TypeError,
        "got dict at position 1: put the others into a group, too",
    ),
    "strings": (lambda k: k.Muon(["a"]), TypeError, r"tensors or \(name, tensor\) pairs, got str at position 0"),
    "pairs the wrong way round": (
        lambda k: k.Muon([(weight(), "a")]),
        TypeError,
        r"\(name, tensor\) pairs, got a tuple of Parameter, str at position 0",
    ),
    "numbers for names": (
        lambda k: k.Muon(enumerate([weight()])),
        TypeError,
        r"\(name, tensor\) pairs, got a tuple of int, Parameter at position 0",
    ),
    "a name without a tensor": (
        lambda k: k.Muon([weight(), ["w", None]]),
        TypeError,
        "got a list of str, NoneType at position 1",
    ),
    "many in one place": (
        lambda k: k.Muon([(weight(), weight(), weight(), 1)]),
        TypeError,
        r"got a tuple of Parameter, Parameter, Parameter, \.\.\. at position 0",
    ),
    "an empty pair": (lambda k: k.Muon([()]), TypeError, "got tuple at position 0"),
    **{
        f"a nested tensor, {layout}": (
            lambda k, layout=layout: k.Muon([("w", nested(layout))]),
            ValueError,
            "parameters must be dense tensors, w is a nested one: give its parts, each with a name",
        )
        for layout in (torch.jagged, torch.strided)
    },
    "groups of a nested tensor": (
        lambda k: k.Muon([{"params": [nested(torch.jagged)], "use_muon": True}]),
        ValueError,
        "param_0 is a nested one",
    ),
    "nothing": (lambda k: k.Muon(None), TypeError, r"got NoneType: write model\.named_parameters\(\)"),
    "a set": (lambda k: k.Muon({weight()}), TypeError, "keep their order between runs: give a list, not a set"),
    "an empty list": (lambda k: k.Muon([]), ValueError, "params are empty: the model has no parameters"),
    "a generator read before": (read_twice, ValueError, "has been read before; make a new one, or a list"),
    "named modules": (
        lambda k: k.Muon(nn.Linear(2, 2).named_modules()),
        TypeError,
        r"got a tuple of str, Linear at position 0: write named_parameters\(\) of it",
    ),
    "a group without params": (lambda k: k.Muon([{"lr": 1.0}]), TypeError, "group needs params, got the keys lr"),
    "params by another name": (
        lambda k: k.Muon([{"parameters": [weight()]}]),
        TypeError,
        "group needs params, got the keys parameters",
    ),
    "a list as a group": (lambda k: k.Muon([weight()]).add_param_group([]), TypeError, "must be a dict, got list"),
    "complex": (
        lambda k: k.Muon([("w", weight(dtype=torch.complex64))]),
        TypeError,
        "w is torch.complex64: give it to a torch.optim.AdamW",
    ),
    "int8": (
        lambda k: k.Muon([("w", weight(dtype=torch.int8))]),
        TypeError,
        r"w is torch\.int8: .* if p\.requires_grad",
    ),
    "float8": (
        lambda k: k.Muon([("w", weight(dtype=torch.float8_e4m3fn))]),
        TypeError,
        "w is torch.float8_e4m3fn: leav",
    ),
    "not a leaf": (lambda k: k.Muon([("w", weight() * 2)]), ValueError, "w is a non-leaf .*give the nn.Parameter"),
    "one name in both branches": (
        lambda k: k.Muon([("a", weight()), ("a", weight(8))]),
        ValueError,
        "two parameters are called a",
    ),
    "a vector for Muon": (
        lambda k: k.Muon([{"params": [("b", weight(8))], "use_muon": True}]),
        ValueError,
        r"asked for b, .* shape is \(8,\)\. For AdamW leave use_muon out",
    ),
    "a vector for Muon, by a pattern": (
        lambda k: k.groups_for(nn.Linear(4, 4), patterns={"*": {"use_muon": True}}),
        ValueError,
        "asked for bias, .* narrower pattern",
    ),
    "a table for Muon": (
        lambda k: k.Muon([{"params": [("pos", weight(1, 32, 64))], "use_muon": True}]),
        ValueError,
        "for position tables, use_muon=False",
    ),
    "tied by data": (tied_by_data, ValueError, "a and b share memory, .*Tie weights by one parameter"),
    "a view inside another": (view_inside_another, ValueError, "a and b share memory"),
    "an expanded bias": (
        lambda k: k.Muon([("bias", Parameter(torch.ones(1).expand(8)))]),
        ValueError,
        r"bias \(8,\) has several elements at one place, with strides \(0,\)\. .*or its \.contiguous\(\)",
    ),
    "an expanded column": (
        lambda k: k.Muon([("w", Parameter(torch.ones(8, 100)[:, :1].expand(8, 4)))]),
        ValueError,
        r"w \(8, 4\) has several elements at one place, with strides \(100, 0\)",
    ),
    "a matrix over itself": (
        lambda k: k.Muon([("w", Parameter(torch.ones(22).as_strided((8, 8), (2, 1))))]),
        ValueError,
        r"w \(8, 8\) has several elements at one place, with strides \(2, 1\)",
    ),
    "a matrix whose rows overlap": (
        lambda k: k.Muon([("w", Parameter(torch.ones(21).as_strided((3, 3), (6, 3))))]),
        ValueError,
        r"w \(3, 3\) has several elements at one place, with strides \(6, 3\)",
    ),
    "a negated view": (
        lambda k: k.Muon([("w", Parameter(torch.ones(8, 8, dtype=torch.complex64).conj().imag))]),
        ValueError,
        r"w is a view that negates what is in memory: give its \.resolve_neg\(\)",
    ),
    "amsgrad": (lambda k: k.Muon([weight()], amsgrad=True), TypeError, "Muon has no argument amsgrad: leave it out"),
    "a lazy module": (
        lambda k: k.Muon(nn.LazyLinear(8).named_parameters()),
        ValueError,
        "weight has no shape yet, .*run the model once",
    ),
    "groups of a lazy module": (lambda k: k.groups_for(nn.LazyLinear(8)), ValueError, "weight has no shape yet"),
    "FSDP1": (of_fsdp1, ValueError, "flat belongs to FSDP1 .*use fully_shard instead .*stage 0"),
    "sparse gradients": (step_with_sparse_gradients, ValueError, r"words\.weight is torch\.sparse_coo: .*sparse=False"),
    "under inference mode": (made_under_inference_mode, RuntimeError, "inference_mode .*: construct the .*outside"),
    "a model made there": (
        of_a_model_made_under_inference_mode,
        ValueError,
        "weight was made under .*: make it outside",
    ),
}


@pytest.mark.parametrize("mistake", PARAMETERS)
def test_a_mistake_is_answered_by_what_to_write(kernel, mistake):
    make, error, words = PARAMETERS[mistake]
    with pytest.raises(error, match=f"(?s){words}"):
        make(kernel)


NO_MISTAKES = {
    "a ParameterList": lambda p: nn.ParameterList([p]),
    "a ParameterList in a group": lambda p: [{"params": nn.ParameterList([p])}],
    "items of a ParameterDict": lambda p: nn.ParameterDict({"a": p}).items(),
    "values of a ParameterDict": lambda p: nn.ParameterDict({"a": p}).values(),
    "items of a dict": lambda p: {"a": p}.items(),
    "keys of a dict": lambda p: {p: "a"}.keys(),
    "a generator in a group": lambda p: [{"params": (each for each in [p])}],
}


@pytest.mark.parametrize("case", NO_MISTAKES)
def test_what_torchs_optimizers_take_is_no_mistake(kernel, case):
    """`ParameterList` is a module, and `keys` and `items` are sets: they have an order all the same."""
    p = weight(8)
    for make in (torch.optim.AdamW, kernel.Muon):
        (group,) = make(NO_MISTAKES[case](p)).param_groups
        assert len(group["params"]) == 1 and group["params"][0] is p


def test_complex_parameters_are_left_out_and_told(kernel):
    """Muon refuses them, and so does `route`, which says what Muon would do."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.complex64), nn.Linear(8, 8))
    with pytest.warns(UserWarning, match="left out: 1.weight"):
        groups = kernel.groups_for(model)
    kernel.Muon(groups)
    assert {row.name for row in groups.choices.rows} == {f"{i}.{of}" for i in (0, 2) for of in ("weight", "bias")}
    (note,) = (note for note in groups.choices.notes if "left out" in note)
    refused = "1.weight (torch.complex64), 1.bias (torch.complex64)"
    assert note == f"left out: {refused}. Give them to a torch.optim.AdamW beside this optimizer"
    with pytest.raises(TypeError, match=r"1\.weight is torch\.complex64: give it to a torch\.optim\.AdamW"):
        kernel.route(model.named_parameters())


def test_nobody_misses_frozen_parameters_that_muon_would_refuse(kernel):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.complex64).requires_grad_(False))
    assert not any(note.startswith("left out: ") for note in kernel.groups_for(model).choices.notes)
