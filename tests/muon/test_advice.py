"""What users should decide is said once, with what to write, and not where all is well."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from tests.support.small_model import named_parameters, take_steps


def parameters(**shapes):
    return [(name.replace("__", "."), Parameter(torch.zeros(shape))) for name, shape in shapes.items()]


def noted(explanation):
    """The notes of `explain()`, without what a variant without a compiled library says of itself."""
    return [note for note in explanation.notes if not note.startswith("portable operations: ")]


def warned(make):
    """What `make` warns of, and what it returns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make()
    assert all(warning.category is UserWarning for warning in caught)
    of_muon = [warning for warning in caught if "qk_clip" not in str(warning.message)]
    assert all(Path(warning.filename).parent == Path(__file__).parent for warning in of_muon)
    return [str(warning.message) for warning in caught], made


def test_an_ordinary_model_needs_no_advice(kernel):
    lines, optimizer = warned(lambda: kernel.Muon(named_parameters().items()))
    assert lines == [] and noted(optimizer.explain()) == []


def test_one_warning_names_what_may_be_stacks(kernel):
    params = parameters(up=(64, 64), a__w=(8, 16, 12), b__w=(8, 16, 24))
    (line,), optimizer = warned(lambda: kernel.Muon(params))
    assert line.startswith(
        "2 parameters (4,608 elements), such as b.w (8, 16, 24): stacks of matrices, or convolutions?"
    )
    for cure in ("expert_keys=", "stacked=True", "stacked=False", "use_muon=False"):
        assert cure in line
    assert noted(optimizer.explain()) == kernel.route(params).notes == [line]


@pytest.mark.parametrize(
    "cure", [dict(expert_keys=("w",)), dict(stacked=True), dict(stacked=False), dict(use_muon=False)], ids=str
)
def test_each_cure_ends_the_warning(kernel, cure):
    params = [{"params": parameters(a__w=(8, 16, 12)), **cure}, {"params": parameters(up=(64, 64))}]
    assert warned(lambda: kernel.Muon(params))[0] == []


def test_what_may_be_a_stack_in_a_stack_or_a_layers_kernel_is_asked_for(kernel):
    lines, _ = warned(lambda: kernel.Muon(parameters(up=(64, 64), experts__proj__weight=(96, 96, 7, 7))))
    assert len(lines) == 1 and lines[0].startswith("experts.proj.weight (96, 96, 7, 7): stacks of matrices, or conv")


def test_how_much_muon_has_is_judged_of_all_groups(kernel):
    """A head is no hidden matrix, and thin ones that are added count beside the matrices that Muon has."""
    lines, optimizer = warned(lambda: kernel.Muon(parameters(up=(64, 64))))
    assert lines == []
    assert warned(lambda: optimizer.add_param_group({"params": parameters(lm_head__weight=(8, 64))}))[0] == []
    assert warned(lambda: optimizer.add_param_group({"params": parameters(a__weight=(4, 1024))}))[0] == []
    (line,), _ = warned(lambda: optimizer.add_param_group({"params": parameters(b__weight=(4, 1024))}))
    assert line.startswith("Muon has 33.3% of the elements of hidden matrices: the fallback updates 2 parameters")
    assert warned(lambda: optimizer.add_param_group({"params": parameters(tiny=(8, 8))}))[0] == []
    assert warned(lambda: optimizer.add_param_group({"params": parameters(down=(64, 64))}))[0] == []


def test_a_group_that_is_added_is_judged_alone(kernel):
    lines, optimizer = warned(lambda: kernel.Muon(parameters(up=(64, 64), a__w=(8, 16, 12))))
    assert len(lines) == 1
    assert warned(lambda: optimizer.add_param_group({"params": parameters(down=(64, 64))}))[0] == []
    (line,), _ = warned(lambda: optimizer.add_param_group({"params": parameters(b__w=(8, 16, 12))}))
    assert line.startswith("b.w (8, 16, 12): stacks")
    assert warned(lambda: copy.deepcopy(optimizer))[0] == []


def test_muon_that_holds_little_says_so(kernel):
    """Where it has less than half of the hidden matrices, whatever tables and heads are beside them."""
    tables = dict(wte__weight=(4096, 64), lm_head__weight=(4096, 64))
    thin = {f"adapters__{i}__weight": (4, 1024) for i in range(2)}
    enough = parameters(**tables, **thin, up__weight=(128, 64))
    assert warned(lambda: kernel.Muon(enough))[0] == []
    (line,), optimizer = warned(lambda: kernel.Muon(parameters(**tables, **thin, up__weight=(127, 64), norm=(64,))))
    assert line.startswith(
        "Muon has 49.8% of the elements of hidden matrices: the fallback updates 2 parameters (8,192 elements), "
        "such as adapters.0.weight (4, 1024), because of extreme_aspect_ratio (2)."
    )
    assert noted(optimizer.explain()) == [line]


def test_muon_that_holds_no_matrix_says_so(kernel):
    (line,), _ = warned(lambda: kernel.Muon(parameters(head__0__weight=(64, 64), head__2__weight=(10, 64))))
    assert line.startswith("Muon has no matrix: the fallback updates 2 parameters (4,736 elements)")
    assert "because of output_head (2)" in line and "use_muon=True" in line and "use_muon=False" in line
    (line,), _ = warned(lambda: kernel.Muon(parameters(thin__weight=(2, 64), depthwise__weight=(8, 1, 3, 3))))
    assert "because of min_dim_too_small (1), leading_unit_dims (1)." in line


@pytest.mark.parametrize("role, is_said", [("embedding", False), ("output_head", False), ("router", True)])
def test_no_matrix_is_no_surprise_where_modules_say_that_all_are_tables_or_heads(kernel, role, is_said):
    group = {"params": parameters(gate__weight=(8, 64)), "use_muon": False, "reason": role, "role": role}
    lines, _ = warned(lambda: kernel.Muon([group]))
    assert [line.startswith("Muon has no matrix: ") for line in lines] == [True] * is_said


@pytest.mark.parametrize("use_muon, why", [(True, {}), (False, {}), (False, {"role": "a"}), (False, {"reason": "b"})])
def test_a_decision_ends_the_warning(kernel, use_muon, why):
    thin = {"params": parameters(thin__weight=(4, 1024)), "use_muon": use_muon, **why}
    assert warned(lambda: kernel.Muon([thin, {"params": parameters(up=(8, 8))}]))[0] == []
    assert warned(lambda: kernel.Muon([thin]))[0] == []
    assert warned(lambda: kernel.Muon(thin["params"], is_muon=lambda name, p: use_muon))[0] == []


def test_vectors_alone_need_no_advice(kernel):
    assert warned(lambda: kernel.Muon(parameters(scale=(64,), one=(1, 64))))[0] == []


@pytest.mark.parametrize("keys", [("expert",), ("*experts*",), ("experts", "w1")], ids=str)
def test_expert_keys_in_no_name_are_said_with_what_a_key_is(kernel, keys):
    params = parameters(up=(64, 64), moe__experts__w=(8, 16, 12))
    lines, optimizer = warned(lambda: kernel.Muon(params, expert_keys=keys, stacked=True))
    assert [line.split(":")[0] for line in lines] == [
        f"expert_keys {[keys[-1]]} are in no parameter's name, such as moe.experts.w"
    ]
    assert warned(lambda: optimizer.add_param_group({"params": parameters(down=(64, 64))}))[0] == []
    group = {"params": parameters(gate=(64, 64)), "expert_keys": ["bank"]}
    (line,), _ = warned(lambda: optimizer.add_param_group(group))
    assert line.startswith("expert_keys ['bank'] are in no parameter's name, such as gate")


def test_expert_keys_in_any_name_are_no_news(kernel):
    """Also where each group has those of all."""
    groups = [{"params": parameters(up=(64, 64))}, {"params": parameters(moe__bank=(8, 16, 12))}]
    assert warned(lambda: kernel.Muon(groups, expert_keys=("bank",)))[0] == []
    assert warned(lambda: kernel.Muon(groups[:1]))[0] == []


@pytest.mark.parametrize("branch", [{"use_muon": True}, {"use_fallback": False}, {"algorithm": "muon"}], ids=str)
def test_is_muon_that_nobody_asks_is_said(kernel, branch):
    groups = [{"params": parameters(up=(64, 64)), **branch}, {"params": parameters(down=(64, 64))}]
    (line,), _ = warned(lambda: kernel.Muon(groups[:1], is_muon=lambda name, p: None))
    assert line.startswith("is_muon is not asked") and "patterns" in line
    assert warned(lambda: kernel.Muon(groups, is_muon=lambda name, p: None))[0] == []
    assert warned(lambda: kernel.Muon(groups[:1]))[0] == []
    assert groups[0].keys() == {"params", *branch}  # as the user wrote it


def test_a_step_without_any_gradient_is_said_once(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    (line,), _ = warned(optimizer.step)
    assert line.startswith("no parameter of this optimizer has a gradient") and "fully_shard(model)" in line
    assert warned(optimizer.step)[0] == []
    sparse = kernel.Muon(params.items())
    params["norm.weight"].grad = torch.zeros_like(params["norm.weight"])
    assert warned(sparse.step)[0] == [] == warned(optimizer.step)[0]
    optimizer.zero_grad()
    assert warned(optimizer.step)[0] == []


def test_steps_without_any_gradient_are_said_once_beside_frozen_parameters(kernel):
    """The line about parameters that get none would say the same again."""
    params = named_parameters()
    params["norm.weight"].requires_grad_(False)
    optimizer = kernel.Muon(params.items())
    assert len([line for _ in range(12) for line in warned(optimizer.step)[0]]) == 1


@pytest.mark.parametrize("observed", [0, 9, 10, None], ids=lambda step: f"observed at {step}")
def test_qk_clip_that_sees_nothing_for_ten_steps_is_said_once(kernel, observed):
    params = named_parameters()
    clip = dict(head_dim=6, layers=[("up.weight", "down.weight")])
    optimizer = kernel.Muon(params.items(), qk_clip=clip)

    def train():
        for step in range(25):
            if step == observed:
                optimizer.observe_qk_logits(0, torch.zeros(4))
            take_steps(optimizer, params, [step])

    lines, _ = warned(train)
    assert len(lines) == (observed in (10, None))
    assert all("observe_qk_logits(layer, logits)" in line for line in lines)


def two_modules(prefixes=("", "")):
    """A group for each of two modules with the same names inside."""
    modules = [nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}) for _ in prefixes]
    return [{"params": list(module.named_parameters(prefix))} for module, prefix in zip(modules, prefixes)]


SAME = "parameters of different groups have the same name: "


def test_names_that_come_in_two_groups_are_said_once(kernel):
    """A load finds out by names whether groups have changed places."""
    groups = two_modules()
    (line,), optimizer = warned(lambda: kernel.Muon(groups))
    assert line.startswith(f"{SAME}up.weight, down.weight, up.bias and 1 more. Files")
    assert 'named_parameters(prefix="...")' in line
    assert noted(optimizer.explain()) == [line]
    assert warned(lambda: copy.deepcopy(optimizer))[0] == []
    assert warned(lambda: kernel.Muon(two_modules(("generator", "critic"))))[0] == []


def test_a_group_that_is_added_under_names_of_others_is_said_once(kernel):
    first, second = two_modules()
    optimizer = kernel.Muon([first])
    (line,), _ = warned(lambda: optimizer.add_param_group({"params": second["params"][:1]}))
    assert line.startswith(f"{SAME}up.weight. Files")
    assert warned(lambda: optimizer.add_param_group({"params": parameters(other=(8, 8))}))[0] == []


def test_names_that_are_made_up_and_those_of_tied_parameters_are_no_mistake(kernel):
    model = nn.ModuleDict({"words": nn.Embedding(16, 8), "head": nn.Linear(8, 16, bias=False)})
    model["head"].weight = model["words"].weight
    tied = list(model.named_parameters(remove_duplicate=False))
    groups = [{"params": tied}, *({"params": [Parameter(torch.zeros(8))]} for _ in range(2))]
    assert warned(lambda: kernel.Muon(groups, is_muon=lambda name, p: False))[0] == []
    optimizer = kernel.Muon(groups[1:])
    for group in optimizer.param_groups:  # as wrappers append parameters, whose names are the same in each group
        group["params"].append(Parameter(torch.zeros(8)))
    assert warned(lambda: optimizer.add_param_group({"params": parameters(other=(8, 8))}))[0] == []
    assert not any(SAME in note for note in optimizer.explain().notes)
