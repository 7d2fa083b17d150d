"""What people write by mistake: each is answered by what was given, what is needed, and what to write instead."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import Parameter


def weight(*shape, dtype=torch.float32):
    return Parameter(torch.ones(shape or (8, 8), dtype=dtype), requires_grad=dtype.is_floating_point)


def attended(kernel, **settings):
    pairs = [("q.weight", weight()), ("k.weight", weight())]
    return kernel.Muon(pairs, qk_clip={"head_dim": 4, "layers": [("q.weight", "k.weight")], **settings})


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


def read_twice(kernel):
    params = nn.Linear(8, 8).named_parameters()
    list(params)
    kernel.Muon(params)


def group_of(kernel, **settings):
    kernel.Muon([{"params": [("qkv.weight", weight(24, 8))], **settings}])


PARAMETERS = {
    "a module": (
        lambda k: k.Muon(nn.Bilinear(2, 2, 2)),
        TypeError,
        r"module, Bilinear: write its named_parameters\(\)",
    ),
    "a Sequential": (lambda k: k.Muon(nn.Sequential(nn.Linear(2, 2))), TypeError, r"Sequential: write its named_p"),
    "modules": (lambda k: k.Muon([nn.Linear(2, 2)]), TypeError, "got Linear at position 0: write its named_parameters"),
    "a module in a group": (lambda k: k.Muon([{"params": nn.Linear(2, 2)}]), TypeError, "Linear: write its named_par"),
    "one tensor": (lambda k: k.Muon(weight()), TypeError, r"got Parameter: write .*\[parameter\] for a single one"),
    "a dict": (lambda k: k.Muon({"a": weight()}), TypeError, r"dict with the keys a: write its items\(\)"),
    "one group": (lambda k: k.Muon({"params": [weight()]}), TypeError, r"write a list of groups, \[group\]"),
    "a string": (lambda k: k.Muon("model"), TypeError, r"got str: write model\.named_parameters\(\)"),
    "strings": (lambda k: k.Muon(["a"]), TypeError, r"tensors or \(name, tensor\) pairs, got str at position 0"),
    "nothing": (lambda k: k.Muon(None), TypeError, r"got NoneType: write model\.named_parameters\(\)"),
    "a set": (lambda k: k.Muon({weight()}), TypeError, "keep their order between runs: give a list, not a set"),
    "an empty list": (lambda k: k.Muon([]), ValueError, "params are empty: does the model have parameters"),
    "a generator read before": (read_twice, ValueError, "empty once it has been read: make a new one, or a list"),
    "a group without params": (lambda k: k.Muon([{"lr": 1.0}]), TypeError, "group needs params, got the keys lr"),
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
SETTINGS = {
    "bf16": (lambda k: k.Muon([weight()], ns_dtype="bf16"), ValueError, "such as float16, bfloat16, .* got 'bf16'"),
    "torch.bfloat16": (
        lambda k: k.Muon([weight()], ns_dtype="torch.bfloat16"),
        ValueError,
        "its name, such as float16",
    ),
    "a string lr": (lambda k: k.Muon([weight()], lr="1e-3"), TypeError, "lr must be a number, got '1e-3': .*1.0e-3"),
    "no lr": (lambda k: k.Muon([weight()], lr=None), TypeError, "lr must be a number, got None"),
    "nan": (lambda k: k.Muon([weight()], lr=float("nan")), ValueError, "lr must be at least 0 .* got nan"),
    "negative": (lambda k: k.Muon([weight()], lr=-0.1), ValueError, "lr must be at least 0 .* got -0.1"),
    "momentum in percent": (
        lambda k: k.Muon([weight()], momentum=95),
        ValueError,
        "momentum must be .* below 1.*, got 95",
    ),
    "one coefficient": (
        lambda k: k.Muon([weight()], ns_coefficients=torch.tensor(3.0)),
        ValueError,
        "ns_coefficients must be a preset",
    ),
    "ns_dtype": (lambda k: k.Muon([weight()], ns_dtype="int8"), ValueError, "ns_dtype must be one of torch.float16"),
    "use_addmm": (lambda k: k.Muon([weight()], use_addmm="yes"), TypeError, "use_addmm must be True, False or None"),
    "a word of a multiplier": (
        lambda k: k.Muon([weight()], adjust_lr_fn=lambda rows, cols: "a"),
        ValueError,
        "multiplier of lr must be a finite number above 0, got 'a' for 8 x 8",
    ),
    "is_muon of route": (lambda k: k.route([weight()], is_muon=5), TypeError, "is_muon must be a function .* got 5"),
    "eps of orthogonalize": (lambda k: k.orthogonalize(weight(), eps="a"), TypeError, "eps must be a number, got 'a'"),
    "a flag as eps": (lambda k: k.orthogonalize(weight(), eps=True), TypeError, "eps must be a number, got True"),
    "out of matmul_transpose": (
        lambda k: k.matmul_transpose(weight(), "x"),
        TypeError,
        "out must be a tensor or None, got str",
    ),
    "shapes of tune": (lambda k: k.tune(5), TypeError, r"shapes must be a list of \(rows, cols\) .* got 5"),
    "all frozen": (
        lambda k: k.Muon(k.groups_for(nn.Linear(8, 8).requires_grad_(False))),
        ValueError,
        "are not all of them frozen",
    ),
    "preset": (lambda k: k.Muon([weight()], ns_coefficients="polar"), ValueError, "'polar' is none of .*polar_express"),
    "method": (lambda k: k.Muon([weight()], ns_method="fast"), ValueError, "one of auto, standard, .*got 'fast'"),
    "decay": (lambda k: k.Muon([weight()], decay_mode="l2"), ValueError, "one of decoupled, .* got 'l2'"),
    "multiplier": (
        lambda k: k.Muon([weight()], adjust_lr_fn="rms"),
        ValueError,
        "'rms' is none of original, match_rms",
    ),
    "fallback": (lambda k: k.Muon([weight()], fallback=torch.optim.AdamW), ValueError, "one of adamw, nadamw, got <cl"),
    "no steps": (lambda k: k.Muon([weight()], ns_steps=0), ValueError, "ns_steps must be at least 1, got 0"),
    "betas": (lambda k: k.Muon([weight()], betas=(0.9, 0.95)), TypeError, "no argument betas: write adamw_betas"),
    "a typing error": (lambda k: k.Muon([weight()], weight_decy=0.1), TypeError, "weight_decy: write weight_decay"),
    "process_group": (lambda k: k.Muon([weight()], process_group=1), TypeError, "write exchange=ExchangeOptions"),
    "use_muon": (lambda k: k.Muon([weight()], use_muon=True), TypeError, "write use_muon in a group, or is_muon="),
    "a word of is_muon": (lambda k: k.Muon([weight()], is_muon=lambda *_: "muon"), TypeError, "must return True, Fal"),
    "is_muon": (
        lambda k: k.Muon([weight()], is_muon=True),
        TypeError,
        "a function .* got True: .*write use_muon in it",
    ),
    "no coefficients": (
        lambda k: k.Muon([weight()], ns_coefficients=None),
        ValueError,
        "ns_coefficients must be a preset .*deepseek_v4.*, got None",
    ),
    "a multiplier of nothing": (
        lambda k: k.Muon([weight()], adjust_lr_fn=lambda rows, cols: None),
        ValueError,
        "multiplier of lr must be a finite number above 0, got None for 8 x 8 from adjust_lr_fn=<function",
    ),
    "logits in a list": (
        lambda k: attended(k).observe_qk_logits(0, [1.0, 2.0]),
        TypeError,
        r"logits must be a tensor \(\.\.\., heads\), got list",
    ),
    "expert_keys": (lambda k: k.Muon([weight()], expert_keys="experts"), TypeError, "expert_keys must be .* 'experts'"),
    "rows": (
        lambda k: group_of(k, split_rows=(8, 8)),
        ValueError,
        r"qkv\.weight must sum to its 24 rows, 8\+8 gives 16",
    ),
    "fused": (lambda k: k.Muon([weight()], fused=True), ValueError, "fused=True has no effect here.*Leave it out"),
    "clip without settings": (lambda k: k.Muon([weight()], qk_clip=True), TypeError, "must be a dict .*got bool"),
    "clip's key": (
        lambda k: attended(k, layer=1),
        ValueError,
        r"qk_clip has no keys \['layer'\], only alpha, by_head, head_dim",
    ),
    "clip's layers": (lambda k: attended(k, layers=[("x", "k.weight")]), ValueError, r"are not parameters: \['x'\]"),
    "clip's layer": (lambda k: attended(k).observe_qk_logits("up", torch.ones(2)), ValueError, "no layer 'up', only 0"),
    "no clip": (
        lambda k: k.Muon([weight()]).observe_qk_logits(0, torch.ones(2)),
        ValueError,
        r"needs Muon\(.*qk_clip=",
    ),
    "a loss": (lambda k: k.Muon([weight()]).step(torch.ones(())), TypeError, r"got Tensor: write loss\.backward\(\)"),
}


@pytest.mark.parametrize("mistake", [*PARAMETERS, *SETTINGS])
def test_a_mistake_is_answered_by_what_to_write(kernel, mistake):
    make, error, words = {**PARAMETERS, **SETTINGS}[mistake]
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


def test_a_third_argument_that_looks_like_a_momentum_is_questioned(kernel):
    """`Muon(params, lr, momentum)` is the order of others. Whoever writes a name is believed."""
    with pytest.warns(UserWarning, match="third argument, 0.95, is weight_decay.*: write momentum=0.95 or") as raised:
        kernel.Muon([weight()], 0.02, 0.95)
    assert raised[0].filename == __file__
    named = [("up", weight())]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel.Muon(named, 0.02, 0.1)
        kernel.Muon(named, 0.02, weight_decay=0.95)
        kernel.Muon(named, 0.02, 0.95, 0.95)
