"""The page of arguments, the table of settings, the constructor and its docstring name the same arguments."""

import inspect

from tools.pages import arguments

# Arguments that no group has.
OF_THE_OPTIMIZER = {"params", "is_muon", "qk_clip", "release_grads", "cuda_graphs", "exchange"}
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
