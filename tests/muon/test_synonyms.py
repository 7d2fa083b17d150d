"""What users of other optimizers pass means the same here, or is refused with the reason and what to write."""

import inspect

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import named_parameters, same_bits, take_steps


def matrix_and_vector():
    return [("up.weight", Parameter(torch.ones(8, 8))), ("norm.weight", Parameter(torch.ones(8)))]


def groups_of(kernel, params, **settings):
    return kernel.Muon([{"params": params, **settings}]).param_groups


def test_arguments_come_in_torchs_order(kernel):
    """torch's main has `use_addmm` last; 2.13 has all others."""
    torchs = [name for name in inspect.signature(torch.optim.Muon).parameters if name != "use_addmm"]
    ours = list(inspect.signature(kernel.Muon).parameters.values())
    assert [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD] == [*torchs, "use_addmm"]


@pytest.mark.parametrize("value", [None, False])
@pytest.mark.parametrize("key", ["use_addmm", "foreach", "fused"])
def test_implementations_that_are_not_asked_for_change_nothing(kernel, key, value):
    params, others, grouped = named_parameters(), named_parameters(), named_parameters()
    optimizers = [kernel.Muon(params.items()), kernel.Muon(others.items(), **{key: value})]
    optimizers.append(kernel.Muon([{"params": grouped.items(), key: value}]))
    for optimizer, named in zip(optimizers, (params, others, grouped)):
        take_steps(optimizer, named, range(2))
    assert same_bits(params, others) and same_bits(params, grouped)
    assert not any(key in group for optimizer in optimizers for group in optimizer.param_groups)


@pytest.mark.parametrize(
    "settings",
    [
        *(dict(use_addmm=True), dict(use_muon=False, use_addmm=True)),
        *(dict(use_muon=False, fused=True), dict(algorithm="nadamw", fused=True)),
    ],
    ids=str,
)
def test_implementations_that_hold_anyway_are_accepted(kernel, settings):
    groups_of(kernel, matrix_and_vector(), **settings)


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(fused=True), "fused=True has no effect here: .* in a group that only adamw updates"),
        (dict(use_muon=True, foreach=True), "foreach=True has no effect here: .* always batched. Leave it out$"),
        (dict(algorithm="adamw", foreach=True), "foreach=True has no effect"),
        (dict(algorithm="nadamw", foreach=True), "foreach=True has no effect"),
    ],
    ids=str,
)
def test_implementations_that_are_not_there_are_refused(kernel, settings, words):
    params = matrix_and_vector()[:1] if "use_muon" in settings else matrix_and_vector()
    with pytest.raises(ValueError, match=words):
        groups_of(kernel, params, **settings)
    with pytest.raises(ValueError, match="has no effect here"):
        kernel.Muon(params, **{key: True for key in settings if key in ("fused", "foreach")})
    with pytest.raises(TypeError, match="fused must be True, False or None, got 'no'"):
        groups_of(kernel, params, fused="no")


def test_betas_and_eps_of_the_fallbacks_groups_are_adamws(kernel):
    """As a group of torch.optim.AdamW has them, handed over as it is."""
    (group,) = groups_of(kernel, matrix_and_vector(), use_muon=False, betas=[0.8, 0.9], eps=1e-5, fused=True)
    assert (group["adamw_betas"], group["adamw_eps"], group["eps"]) == ((0.8, 0.9), 1e-5, 1e-7)
    assert "betas" not in group
    (group,) = groups_of(kernel, matrix_and_vector()[1:], betas=(0.8, 0.9))
    assert (group["adamw_betas"], group["adamw_eps"]) == ((0.8, 0.9), 1e-8)
    with pytest.raises(ValueError, match="adamw_betas must be two numbers, got None"):
        groups_of(kernel, matrix_and_vector()[1:], betas=None)


def test_adamw_betas_and_eps_go_before_the_names_of_others(kernel):
    options = dict(betas=(0.8, 0.9), eps=1e-5, adamw_betas=(0.7, 0.9), adamw_eps=1e-6)
    (group,) = groups_of(kernel, matrix_and_vector(), use_muon=False, **options)
    assert (group["adamw_betas"], group["adamw_eps"]) == ((0.7, 0.9), 1e-6)


def test_groups_of_an_optimizer_make_the_same_one_again(kernel):
    first = kernel.Muon(named_parameters().items(), eps=1e-3, adamw_eps=1e-5, adamw_betas=(0.7, 0.8))
    again = kernel.Muon(first.param_groups, eps=1e-3)
    assert again.param_groups == first.param_groups


def test_eps_stays_muons_and_betas_are_refused_where_a_group_has_both(kernel):
    muon, adamw = groups_of(kernel, matrix_and_vector(), eps=1e-5)
    assert (muon["eps"], adamw["adamw_eps"]) == (1e-5, 1e-8)
    with pytest.raises(ValueError, match=r"betas are AdamW's, and Muon has .* write adamw_betas"):
        groups_of(kernel, matrix_and_vector(), betas=(0.8, 0.9))


@pytest.mark.parametrize("wish, branch", [(True, "muon"), (False, "adamw"), (None, "muon")])
def test_an_attribute_of_a_parameter_decides_where_nothing_else_does(kernel, wish, branch):
    """As in DeepSpeed, whose models set `use_muon` on their parameters."""
    p = Parameter(torch.ones(8, 8))
    p.use_muon = wish
    assert [row.branch for row in kernel.Muon([("up.weight", p)]).explain().rows] == [branch]
    for undecided in (None, lambda name, p: None):
        assert [row.branch for row in kernel.route([("up.weight", p)], is_muon=undecided).rows] == [branch]
    p.use_muon = True
    assert kernel.route([("up.weight", p)], is_muon=lambda *_: False).rows[0].branch == "adamw"
    assert groups_of(kernel, [("up.weight", p)], use_muon=False)[0]["use_muon"] is False


def test_wrong_attributes_of_parameters_are_refused(kernel):
    vector, odd = Parameter(torch.ones(8)), Parameter(torch.ones(8, 8))
    vector.use_muon, odd.use_muon = True, "yes"
    with pytest.raises(ValueError, match="norm, which is not a matrix"):
        kernel.Muon([("norm", vector)])
    with pytest.raises(TypeError, match="use_muon of a parameter must be True, False or None, got 'yes'"):
        kernel.Muon([("up", odd)])


@pytest.mark.parametrize("key", ["use_muon", "use_fallback"])
def test_a_tensor_is_no_choice_between_branches(kernel, key):
    with pytest.raises(TypeError, match=rf"{key} must be True, False or None, got tensor\(\["):
        kernel.Muon([{"params": [Parameter(torch.ones(4, 4))], key: torch.tensor([True, False])}])


@pytest.mark.parametrize(
    "algorithm, branch", [("muon", (True, "adamw")), ("adamw", (False, "adamw")), ("nadamw", (False, "nadamw"))]
)
def test_algorithm_of_a_group_is_its_branch(kernel, algorithm, branch):
    """dion's key, with the names of the fallbacks."""
    (group,) = groups_of(kernel, matrix_and_vector()[:1], algorithm=algorithm)
    assert (group["use_muon"], group["fallback"]) == branch and "algorithm" not in group


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(algorithm="lion"), "algorithm must be one of muon, adamw, nadamw, got 'lion'"),
        (dict(algorithm="adamw", use_muon=True), "use_muon=True and algorithm='adamw' contradict each other"),
        (dict(use_muon=False, use_fallback=False), "use_muon=False and use_fallback=False contradict each other"),
    ],
    ids=str,
)
def test_branches_that_cannot_be_are_refused(kernel, settings, words):
    with pytest.raises(ValueError, match=words):
        groups_of(kernel, matrix_and_vector()[:1], **settings)


def test_update_rms_scales_the_steps_of_matrices(kernel):
    """Of one group, where another one keeps the default."""
    params = [{"params": [(name, Parameter(torch.ones(8, 16)))]} for name in "ab"]
    optimizer = kernel.Muon([{**params[0], "update_rms": 0.18}, params[1]])
    assert [row.multiplier for row in optimizer.explain().rows] == [pytest.approx(0.18 * 4), pytest.approx(0.2 * 4)]
    (row,) = kernel.route(params[0]["params"], update_rms=0.18).rows
    assert row.multiplier == optimizer.explain().rows[0].multiplier


def test_the_first_unknown_argument_is_named(kernel):
    with pytest.raises(TypeError, match="Muon has no argument learning_rate: write lr"):
        kernel.Muon(matrix_and_vector(), learning_rate=1.0, beta=0.9, wd=0.1, mu=0.9)
