"""Settings and arguments that people write by mistake: an error says what was given, needed, and what to write."""

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


def group_of(kernel, **settings):
    kernel.Muon([{"params": [("qkv.weight", weight(24, 8))], **settings}])


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
    "above all floats": (lambda k: k.Muon([weight()], lr=10**400), ValueError, "lr must be at least 0 and below inf"),
    "three betas": (
        lambda k: k.Muon([weight()], adamw_betas=(0.9, 0.95, 0.99)),
        ValueError,
        "adamw_betas must be two numbers",
    ),
    "a beta of 1": (
        lambda k: k.Muon([weight()], adamw_betas=(0.9, 1.0)),
        ValueError,
        r"adamw_betas\[1\] must be",
    ),
    "a multiplier of one side": (lambda k: k.Muon([weight()], adjust_lr_fn=lambda rows: 1.0), TypeError, "rows.* cols"),
    "steps that are True": (lambda k: k.Muon([weight()], ns_steps=True), TypeError, "ns_steps must be .* got True"),
    "an empty key": (lambda k: k.Muon([weight()], expert_keys=("",)), TypeError, "expert_keys must be .* of names"),
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
    "foreach of a tensor": (
        lambda k: k.Muon([weight()], foreach=torch.tensor([True, False])),
        TypeError,
        r"foreach must be True, False or None, got tensor\(\[ True, False\]\)",
    ),
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
        "out must be a plain tensor or None, got str",
    ),
    "shapes of tune": (lambda k: k.tune(5), TypeError, r"shapes must be a list of \(rows, cols\) .* got 5"),
    "all frozen": (
        lambda k: k.Muon(k.groups_for(nn.Linear(8, 8).requires_grad_(False))),
        ValueError,
        "all of them are frozen",
    ),
    "preset": (lambda k: k.Muon([weight()], ns_coefficients="polar"), ValueError, "'polar' is none of .*polar_express"),
    "method": (lambda k: k.Muon([weight()], ns_method="fast"), ValueError, "one of auto, standard, .*got 'fast'"),
    "conv_mode": (lambda k: k.Muon([weight()], conv_mode="flat"), ValueError, "one of flatten, batched, got 'flat'"),
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
    "exchange": (lambda k: k.Muon([weight()], exchange=1), TypeError, r"write ExchangeOptions\(process_group=\.\.\.\)"),
    "use_muon": (lambda k: k.Muon([weight()], use_muon=True), TypeError, "write use_muon in a group, or is_muon="),
    "a word of is_muon": (lambda k: k.Muon([weight()], is_muon=lambda *_: "muon"), TypeError, "must return True, Fal"),
    "a number of is_muon": (lambda k: k.Muon([weight()], is_muon=lambda *_: 1), TypeError, "True, False or .*, got 1"),
    "a tensor of is_muon": (
        lambda k: k.Muon([weight()], is_muon=lambda *_: torch.tensor([True, False])),
        TypeError,
        r"must return True, False or None .*got tensor\(\[ True, False\]\)",
    ),
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
        r"qk_clip has no keys \['layer'\], only alpha, by_head, head_dim, .*, report, ",
    ),
    "clip's layers": (lambda k: attended(k, layers=[("x", "k.weight")]), ValueError, r"are not parameters: \['x'\]"),
    "clip's layer": (lambda k: attended(k).observe_qk_logits("up", torch.ones(2)), ValueError, "no layer 'up', only 0"),
    "no clip": (
        lambda k: k.Muon([weight()]).observe_qk_logits(0, torch.ones(2)),
        ValueError,
        r"needs Muon\(.*qk_clip=",
    ),
    "a list of masters": (
        lambda k: k.Muon([weight()]).load_master_weights([weight()]),
        TypeError,
        "must be a dict of float32 tensors by name, got list",
    ),
    "a loss": (lambda k: k.Muon([weight()]).step(torch.ones(())), TypeError, r"got Tensor: write loss\.backward\(\)"),
}


@pytest.mark.parametrize("mistake", SETTINGS)
def test_a_mistake_is_answered_by_what_to_write(kernel, mistake):
    make, error, words = SETTINGS[mistake]
    with pytest.raises(error, match=f"(?s){words}"):
        make(kernel)


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


def test_a_computed_tensor_that_keeps_its_gradient_is_taken_as_by_torch(kernel):
    computed = 2 * weight()
    computed.retain_grad()
    for make in (torch.optim.AdamW, kernel.Muon):
        assert make([computed]).param_groups[0]["params"] == [computed]


@pytest.mark.parametrize("shape", [(0, 8), (8, 0)], ids=str)
def test_a_matrix_without_elements_is_none(kernel, shape):
    with pytest.raises(ValueError, match=r"Muon was asked for up\.weight, which is not a matrix"):
        kernel.Muon([{"params": [("up.weight", Parameter(torch.ones(shape)))], "use_muon": True}])
