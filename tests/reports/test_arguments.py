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
