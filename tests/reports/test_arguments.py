"""The page of arguments, the table of settings, the constructor and its docstring name the same arguments."""

import ast
import inspect
import operator
import re

import pytest
import torch
from torch.nn import Parameter

from tools.pages import arguments

# Arguments that no group has.
OF_THE_OPTIMIZER = {"params", "is_muon", "qk_clip", "release_grads", "cuda_graphs", "exchange"}
COMPARED = {">=": operator.ge, ">": operator.gt, "<": operator.lt}
# Arguments that change nothing: what they ask for holds, or is refused.
OF_TORCH = {"use_addmm", "foreach", "fused"}


def test_the_page_is_what_the_class_and_the_table_make(repository):
    assert (repository / "docs/arguments.md").read_text() == arguments.page(repository / "torch-ext" / "optimizer")


def test_every_setting_is_an_argument_and_is_explained(kernel):
    """All but those that only a group can have; forgetting one of the three places fails here."""
    settings = kernel.parameters.settings.SETTINGS.keys() - kernel.parameters.settings.OF_GROUPS.keys()
    signature = set(inspect.signature(kernel.Muon).parameters)
    explained = {name for name, _ in arguments.meanings_of(inspect.getdoc(kernel.Muon))}
    assert signature - OF_THE_OPTIMIZER - OF_TORCH == settings
    assert explained == signature


def test_every_setting_has_a_role_that_the_page_can_say(kernel):
    settings = kernel.parameters.settings
    assert {role.name for role in settings.Role} == set(arguments.WHEN)
    assert arguments.roles_of_settings(arguments.PACKAGE) == {
        key: setting.role.name for key, setting in settings.SETTINGS.items()
    }
    assert arguments.roles_of_derived(arguments.PACKAGE) == {key: role.name for key, role in settings._DERIVED.items()}


# A value that each key of a group has later, with the settings of a group in which it changes what steps do.
LATER = {
    "use_muon": (False, {"use_muon": True}),
    "use_fallback": (True, {"use_muon": True}),
    "split_rows": ((4, 8), {}),
    "transposed": (True, {"adjust_lr_fn": "original"}),
    "lr_factor": (0.5, {"use_muon": False}),
    "decay_lr": (0.5, {"decay_mode": "corrected"}),
    "rounding_step": (7, {"stochastic_rounding": True}),
    "role": ("key", {}),
    "reason": ("it is one", {"use_muon": True}),
    "_anything": (1, {}),
}


def test_steps_read_the_keys_of_a_group_whose_change_the_page_says(kernel):
    roles = arguments.roles_of_settings(arguments.PACKAGE) | arguments.roles_of_derived(arguments.PACKAGE)
    explained = [name for names, _ in arguments.group_keys_of(inspect.getdoc(kernel.Muon)) for name in names]
    assert set(explained) == set(LATER)
    for key, (value, settings) in LATER.items():
        ends = []
        for later in {}, {key: value}:
            p = Parameter(torch.linspace(-1, 1, 96, dtype=torch.bfloat16).reshape(12, 8).sin())
            optimizer = kernel.Muon([{"params": [("p", p)], **settings}], lr=0.1)
            for _ in range(2):
                p.grad = p.detach().cos()
                optimizer.step()
                optimizer.param_groups[0].update(later)
            ends.append(p.detach())
        assert torch.equal(*ends) != bool(arguments.change_of_keys([key], roles)), key


def test_the_page_says_which_numbers_and_flags_are_accepted(kernel):
    """The bounds, what is just beyond them, and what is between whole numbers."""
    checks = arguments.checks_of_settings(arguments.PACKAGE)
    muon = ast.parse(inspect.getsource(kernel.Muon)).body[0]
    stated = {name: arguments.values_of(checks.get(name, ""), default) for name, default in arguments.defaults(muon)}
    assert len([values for values in stated.values() if values]) > 15
    for name, values in stated.items():
        for value in (None, True, False, -1e-3, 0.0, 0.5, 1, 2.0) if values else ():
            value = (value, value) if values.startswith("two") else value
            if is_stated(values, value):
                kernel.Muon([Parameter(torch.eye(16))], **{name: value})
                continue
            with pytest.raises((TypeError, ValueError), match=name):
                kernel.Muon([Parameter(torch.eye(16))], **{name: value})


def is_stated(values: str, value: object) -> bool:
    """Whether the page's text includes a value, or a pair of it."""
    value = value[0] if isinstance(value, tuple) else value
    if value is None or isinstance(value, bool):
        return str(value) in values
    bounds = re.findall(r"([<>]=?) (\d)", values)
    whole = isinstance(value, int) or "whole" not in values
    return bool(bounds) and whole and all(COMPARED[sign](value, float(bound)) for sign, bound in bounds)
