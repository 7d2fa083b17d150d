"""Which state of a file without names is whose, and a rate that stays what it was in the file."""

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import named_parameters, set_gradients, take_steps


def two_groups_in_another_order():
    """The head first, as in the example of muon.py."""
    params = {name: Parameter(torch.randn(8, 8)) for name in ("wte.weight", "up.weight", "lm_head.weight")}
    pairs = list(params.items())
    rest = [dict(params=[p for _, p in pair], lr=0.1, use_muon=False) for pair in (pairs[2:], pairs[:1])]
    return params, [*rest, dict(params=[params["up.weight"]], lr=0.02, momentum=0.95, weight_decay=0.0, use_muon=True)]


def test_a_head_does_not_get_the_state_of_an_embedding_of_its_shape(kernel):
    params, groups = two_groups_in_another_order()
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    take_steps(adamw, params, [0])
    saved = adamw.state_dict()
    saved["state"][2] = {"momentum_buffer": saved["state"][2]["exp_avg"]}
    for group in saved["param_groups"]:
        del group["amsgrad"]
    optimizer = kernel.Muon(params.items())
    before = optimizer.param_groups[1]["lr"]
    words = r"adamw parameters \(8, 8\) are in 1 group here and in 2 of the source: .* Pass `names`"
    with pytest.raises(ValueError, match=words):
        kernel.import_state(optimizer, saved, "keller_jordan")
    assert optimizer.param_groups[1]["lr"] == before
    kernel.import_state(optimizer, saved, "keller_jordan", names=["lm_head.weight", "wte.weight", "up.weight"])
    for name in ("wte.weight", "lm_head.weight"):
        assert torch.equal(optimizer.state[params[name]]["exp_avg"], adamw.state[params[name]]["exp_avg"])


def test_groups_of_the_source_that_shapes_tell_apart_may_be_one_here(kernel):
    params = {name: Parameter(torch.randn(8, size)) for name, size in (("0.weight", 8), ("1.weight", 12))}
    source = torch.optim.Muon([{"params": [p]} for p in params.values()])
    take_steps(source, params, [0])
    optimizer = kernel.Muon(params.items())
    kernel.import_state(optimizer, source.state_dict())
    for p in params.values():
        assert torch.equal(optimizer.state[p]["momentum_buffer"], source.state[p]["momentum_buffer"])


def test_a_long_list_of_shapes_that_do_not_fit_does_not_hide_what_to_pass(kernel):
    params = {f"{i}.weight": Parameter(torch.randn(8, 8 + 4 * (i % 2))) for i in range(30)}
    source = torch.optim.Muon(list(params.values())[::-1])
    take_steps(source, params, [0])
    optimizer = kernel.Muon(params.items())
    with pytest.raises(ValueError, match=r"and 10 more\n  the source has no names, .*: pass `names`, [^\n]*$"):
        kernel.import_state(optimizer, source.state_dict())
    kernel.import_state(optimizer, source.state_dict(), names=list(params)[::-1])


def test_matrices_that_keller_jordans_file_has_unsorted_keep_their_order(kernel):
    shapes = {"small.weight": (8, 8), "large.weight": (24, 8)}
    params = {name: Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    momentum = [torch.randn(shape) for shape in shapes.values()]
    group = {"params": [0, 1], "lr": 0.02, "momentum": 0.95, "weight_decay": 0.01, "use_muon": True}
    state = {i: {"momentum_buffer": each} for i, each in enumerate(momentum)}
    optimizer = kernel.Muon(params.items())
    kernel.import_state(optimizer, {"state": state, "param_groups": [group]}, "keller_jordan")
    assert all(torch.equal(optimizer.state[p]["momentum_buffer"], each) for p, each in zip(params.values(), momentum))


def test_the_fallback_takes_its_rate_beside_hyperball(kernel):
    params = named_parameters()
    source = torch.optim.AdamW(params.values(), lr=0.5)
    set_gradients(params, 0)
    source.step()
    optimizer = kernel.Muon(params.items(), experimental_hyperball=True)
    kernel.import_state(optimizer, source.state_dict(), source="adamw")
    (rest,) = (group for group in optimizer.param_groups if not group["use_muon"])
    assert rest["lr"] * rest["lr_factor"] == pytest.approx(0.5, rel=4 * 2**-53, abs=0)
