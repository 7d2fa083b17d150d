"""State without names goes by its order, and by nothing else; names count where there are any."""

import copy

import pytest
import torch
from torch.nn import Parameter

from tests.support.published_muons import CASES, MATRICES, REST, fresh
from tests.support.small_model import named_parameters, take_steps


def swapped(state_dict):
    """Let the first two parameters of a file change places."""
    state = state_dict["state"]
    return {**state_dict, "state": {**state, 0: state[1], 1: state[0]}}


def momenta(optimizer, params):
    return [optimizer.state[params[name]]["momentum_buffer"] for name in MATRICES]


def test_names_that_a_group_of_the_source_has_count_and_not_its_order(kernel):
    _, state_dict, source, _, _ = CASES["motif"]()
    params, optimizer = fresh(kernel)
    kernel.import_state(optimizer, copy.deepcopy(state_dict), source)
    expected = list(map(torch.clone, momenta(optimizer, params)))
    muon, rest = state_dict["param_groups"]
    groups = [{**muon, "names": MATRICES[::-1]}, rest]
    kernel.import_state(optimizer, {**swapped(state_dict), "param_groups": groups}, source)
    assert all(map(torch.equal, momenta(optimizer, params), expected))


def test_matrices_of_a_source_that_sorts_them_keep_an_order_that_fits(kernel):
    """muon.py's Muon and MuonWithAuxAdam have the largest first, its SingleDeviceMuon does not sort."""
    _, state_dict, source, others, _ = CASES["keller_jordan of matrices alone"]()
    params = named_parameters(torch.float64)
    params, optimizer = fresh(kernel, {name: params[name] for name in ["down.weight", "up.weight", *REST]})
    kernel.import_state(optimizer, swapped(state_dict), source, **others)
    for i, momentum in enumerate(momenta(optimizer, params)):
        assert torch.equal(momentum, state_dict["state"][i]["momentum_buffer"])


def test_matrices_of_a_source_that_does_not_sort_them_are_never_sorted(kernel):
    """Where shapes show that the order is another one, those that they do not tell apart may be mixed up, too."""
    _, state_dict, source, _, _ = CASES["dion"]()
    params = named_parameters(torch.float64)
    _, optimizer = fresh(kernel, {name: params[name] for name in ["down.weight", "up.weight", *REST]})
    with pytest.raises(ValueError, match=r"down\.weight is \(12, 24\) here, its momentum in the source \(24, 12\)"):
        kernel.import_state(optimizer, state_dict, source)


@pytest.mark.parametrize("first", ["wte.weight", "_orig_mod.wte.weight"])
def test_a_parameter_with_two_entries_is_refused(kernel, first):
    """One of them, or both, have a wrapper's part in their names."""
    _, state_dict, source, _, _ = CASES["motif"]()
    _, optimizer = fresh(kernel)
    with pytest.raises(ValueError, match=r"module\.wte\.weight of the source is not here, or comes twice"):
        names = [*MATRICES, first, "module.wte.weight", "norm.weight"]
        kernel.import_state(optimizer, state_dict, source, names=names)


@pytest.mark.filterwarnings("ignore:parameters of different groups have the same name")
@pytest.mark.parametrize("there, here", [(1, 2), (2, 1)])
def test_an_entry_of_a_name_that_parameters_on_either_side_share_is_refused(kernel, there, here):
    modules = [torch.nn.Linear(8, 8, bias=False) for _ in range(2)]
    adamw = torch.optim.AdamW([{"params": module.named_parameters()} for module in modules[:there]])
    for module in modules[:there]:
        take_steps(adamw, dict(module.named_parameters()), [0])
    optimizer = kernel.Muon([{"params": module.named_parameters(), "use_muon": True} for module in modules[:here]])
    with pytest.raises(ValueError, match="several parameters are called weight"):
        kernel.import_state(optimizer, adamw.state_dict(), "adamw")


@pytest.mark.parametrize("count, last", [(20, "19"), (21, "and 1 more")])
def test_an_error_lists_twenty_problems_and_counts_the_others(kernel, count, last):
    problems = list(map(str, range(count)))
    lines = kernel.interop.state_matching.refusal(problems, ["hint"]).split("\n  ")
    assert lines[1:21] == problems[:20] and lines[-2:] == [last, "hint"]


@pytest.mark.filterwarnings("ignore:parameters of different groups have the same name")
def test_names_that_parameters_here_share_do_not_matter_where_the_source_has_none(kernel):
    modules = [torch.nn.Linear(8, 8, bias=False) for _ in range(2)]
    muon = torch.optim.Muon([{"params": [module.weight]} for module in modules])
    for number, module in enumerate(modules):
        module.weight.grad = torch.full((8, 8), 1.0 + number)
    muon.step()
    optimizer = kernel.Muon([{"params": module.named_parameters(), "use_muon": True} for module in modules])
    kernel.import_state(optimizer, muon.state_dict())
    for module in modules:
        buffers = [each.state[module.weight]["momentum_buffer"] for each in (muon, optimizer)]
        assert torch.equal(*buffers)


def in_two_groups(params):
    adamw = torch.optim.AdamW([{"params": [p]} for p in params.values()])
    take_steps(adamw, params, [0])
    return adamw.state_dict()


def test_an_embedding_and_a_head_that_had_groups_of_their_own_are_refused_in_one(kernel):
    """Nothing shows which of them is first: muon.py's example has the head there."""
    _, state_dict, source, _, _ = CASES["torch"]()
    params = {name: p for name, p in named_parameters(torch.float64).items() if name in MATRICES}
    tables = {name: Parameter(torch.ones(40, 12)) for name in ("wte.weight", "lm_head.weight")}
    optimizer = kernel.Muon({**params, **tables}.items())
    with pytest.raises(ValueError, match=r"adamw parameters \(40, 12\) are in 1 group here and in 2 of the source"):
        kernel.import_state(optimizer, state_dict, source, adamw_state_dict=in_two_groups(tables))


def test_one_group_is_enough_for_adamw_where_shapes_tell_those_of_its_groups_apart(kernel):
    """A matrix of each group, and a vector between them that only the second one has next."""
    params = {"0.up.weight": torch.ones(8, 8), "norm.weight": torch.ones(8), "1.up.weight": torch.ones(8, 8)}
    params = {name: Parameter(p) for name, p in params.items()}
    first, *others = params.values()
    adamw = torch.optim.AdamW([{"params": [first]}, {"params": others}])
    take_steps(adamw, params, [0])
    optimizer = kernel.Muon(params.items())
    kernel.import_state(optimizer, adamw.state_dict(), "adamw")
    for name in ("0.up.weight", "1.up.weight"):
        p = params[name]
        assert torch.equal(optimizer.state[p]["momentum_buffer"], adamw.state[p]["exp_avg"])


def test_names_are_enough_for_groups_that_differ(kernel):
    params = {f"{i}.up.weight": Parameter(torch.ones(8, 8)) for i in range(2)}
    muon = torch.optim.Muon([{"params": [pair]} for pair in params.items()])
    take_steps(muon, params, [0])
    optimizer = kernel.Muon(list(params.items())[::-1])
    kernel.import_state(optimizer, muon.state_dict())
    for p in params.values():
        assert torch.equal(optimizer.state[p]["momentum_buffer"], muon.state[p]["momentum_buffer"])


def test_a_parameter_that_adamws_file_lacks_is_missed(kernel):
    """Without such a file all of AdamW's parameters stay as they are; with one they would be mixed up with others."""
    _, state_dict, source, others, _ = CASES["torch"]()
    others["adamw_state_dict"]["param_groups"][0]["params"].pop()
    _, optimizer = fresh(kernel)
    with pytest.raises(ValueError, match=f"{REST[-1]} is missing in the source"):
        kernel.import_state(optimizer, state_dict, source, names=[*MATRICES, *REST[:-1]], **others)


def test_nothing_is_noted_of_a_parameter_that_is_frozen_on_both_sides(kernel):
    params = named_parameters()
    params["wte.weight"].requires_grad_(False)
    adamw = torch.optim.AdamW(params.items())
    take_steps(adamw, {name: p for name, p in params.items() if p.requires_grad}, [0])
    notes = kernel.import_state(kernel.Muon(params.items()), adamw.state_dict(), "adamw")
    assert "anew" not in " ".join(notes)


@pytest.mark.filterwarnings("ignore:the file has no state of norm.weight")
@pytest.mark.parametrize("key", ["group", "state"])
def test_a_parameters_own_count_comes_before_its_groups(kernel, key):
    """dion's groups have one in older files; a parameter that never had a gradient has none, and begins anew."""
    reference, state_dict, source, _, _ = CASES["dion"]()
    for position in (2, 3):
        state_dict["state"][position].update({"step": 3.0} if key == "state" else {})
    del state_dict["state"][4]
    params, optimizer = fresh(kernel)
    notes = kernel.import_state(optimizer, state_dict, source)
    assert any("no state of norm.weight: it starts anew" in note for note in notes)
    counts = [optimizer.state[params[name]]["step"] for name in REST[:2]]
    assert counts == [3.0 if key == "state" else reference.steps] * 2
