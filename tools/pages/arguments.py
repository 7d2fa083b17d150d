"""Write docs/arguments.md: every argument of Muon, from its signature, its docstring and the table of settings.

python -m tools.pages.arguments [--check]
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tools.pages.generated import write_or_check

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torch-ext" / "optimizer"
PAGE = ROOT / "docs/arguments.md"

INTRODUCTION = """\
# Arguments of `Muon`

Names and order follow `torch.optim.Muon`; arguments that it does not have are keyword-only. *Group* says whether a
parameter group may have its own value. *Values* says which numbers and flags are accepted; where it is empty, *meaning*
names all values. AdamW (or NAdamW, by `fallback`) updates the parameters that are not matrices; they are called the
fallback's parameters.

*Change* says what happens if you set another value in `opt.param_groups` between two steps. With *next step* it is used
from then on. *new plan* means the same, but that step first works out again which matrices it has and how they are
computed, which takes longer once. Where the column is empty, give the value when the optimizer is made. To change
AdamW's rate later, set `lr_factor` in its group, or its `lr`. To change its decay, set `weight_decay` there. Setting
`adamw_lr` or `adamw_weight_decay` raises.

`python -m tools.pages.arguments` makes this page from the class and from `parameters/settings.py`.

| argument | default | values | group | change | meaning |
| --- | --- | --- | --- | --- | --- |
"""

GROUP_KEYS = """
## Keys of a parameter group

A group dict may have every argument marked *group* above, and these keys. *Change* says the same as above; a step reads
no key for which it says nothing.

| keys | change | meaning |
| --- | --- | --- |
"""

# Keys of a group that are no settings: groups check and forget them.
OF_TORCH = ("use_addmm", "foreach", "fused")

# The column *values*, by the check of a setting in parameters/settings.py.
ACCEPTED = {
    "optional(flag)": "None, True, False",
    "plain_number": ">= 0",
    "plain_number_or_tensor": ">= 0",
    "optional(plain_number_or_tensor)": "None, >= 0",
    "plain_positive": "> 0",
    "plain_below_one": ">= 0, < 1",
    "plain_betas": "two: >= 0, < 1",
    "plain_count": "whole, >= 1",
}

# The column *change*, by the role of a setting in parameters/settings.py.
WHEN = {
    "PLAN": "new plan",
    "METHOD": "new plan",
    "RECIPE": "next step",
    "LIVE": "next step",
    "HOST": "",
}


def page(package: Path) -> str:
    """Return the page for the package in a folder."""
    tree = ast.parse((package / "muon.py").read_text())
    muon = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Muon")
    docstring = ast.get_docstring(muon)
    checks, roles = checks_of_settings(package), roles_of_settings(package)
    meanings = dict(meanings_of(docstring))
    rows = []
    for name, default in defaults(muon):
        default = constant(package, tree, default) if default.isupper() else default
        group = "yes" if name in roles or name in OF_TORCH else ""
        when = WHEN[roles[name]] if name in roles else ""
        values = values_of(checks.get(name, ""), default)
        shown = f"`{default}`" if default else ""
        rows.append(f"| `{name}` | {shown} | {values} | {group} | {when} | {meanings[name]} |\n")
    keys = []
    for names, meaning in group_keys_of(docstring):
        when = change_of_keys(names, roles | roles_of_derived(package))
        keys.append(f"| {', '.join(f'`{name}`' for name in names)} | {when} | {meaning} |\n")
    return INTRODUCTION + "".join(rows) + GROUP_KEYS + "".join(keys)


def values_of(check: str, default: str) -> str:
    """Return which numbers and flags an argument accepts, by its check and its default; "" for other arguments."""
    return ACCEPTED.get(check, "True, False" if default in ("True", "False") else "")


def defaults(muon: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield each argument of the constructor and the source of its default, empty where there is none."""
    init = next(node for node in muon.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    positional = init.args.args[1:]
    missing = [None] * (len(positional) - len(init.args.defaults))
    for argument, default in zip(positional, [*missing, *init.args.defaults], strict=True):
        yield argument.arg, "" if default is None else ast.unparse(default)
    for argument, default in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True):
        yield argument.arg, ast.unparse(default)


def constant(package: Path, tree: ast.Module, name: str) -> str:
    """Return the source of the value of a constant that a file of the package, `tree`, imports by its name."""
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    module = next(node.module for node in imports if name in (alias.name for alias in node.names))
    body = ast.parse(package.joinpath(*module.split(".")).with_suffix(".py").read_text()).body
    assigned = (node for node in body if isinstance(node, ast.Assign))
    return ast.unparse(next(node.value for node in assigned if name in map(ast.unparse, node.targets)))


def meanings_of(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield the arguments that a docstring's `Args:` explains, each with its text in one line."""
    for names, text in _entries(docstring.split("Args:\n")[1]):
        for name in names.split(", "):
            yield name.strip(), linked(text)


def group_keys_of(docstring: str) -> Iterator[tuple[list[str], str]]:
    """Yield the entries below a docstring's `Group keys:`: names, and the text in one line."""
    for names, text in _entries(docstring.split("Group keys:")[1].split("\n", 1)[1]):
        yield names.split(", "), linked(text)


def change_of_keys(names: Sequence[str], roles: Mapping[str, str]) -> str:
    """Return when a change of keys that are explained together is used, with the names of those of which it is true."""
    used = {name: WHEN[roles[name]] for name in names if name in roles}
    if len(names) == len(used) == 1:
        return used[names[0]]
    return ", ".join(f"`{name}`: {when}" for name, when in used.items())


def linked(text: str) -> str:
    """Return text for a cell of a table, with links to the pages that it names, for a page beside them."""
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text.replace("|", "\\|"))


def _entries(section: str) -> Iterator[tuple[str, str]]:
    """Yield the `names: text` entries of a docstring's section, which an empty line ends."""
    for entry in re.split(r"\n    (?=\S)", "\n" + section.split("\n\n")[0])[1:]:
        names, text = entry.split(":", 1)
        yield names, " ".join(text.split())


def checks_of_settings(package: Path) -> dict[str, str]:
    """Return the source of the check of each setting in the package's table, by its name."""
    return {name: ast.unparse(call.args[0]) for name, call in _settings(package)}


def roles_of_settings(package: Path) -> dict[str, str]:
    """Return the role of each setting in the package's table, by its name."""
    return {name: call.args[1].attr for name, call in _settings(package)}


def roles_of_derived(package: Path) -> dict[str, str]:
    """Return the role of each group key that is in the package's settings but not in their table, by its name."""
    tree = ast.parse((package / "parameters" / "settings.py").read_text())
    assigned = (node for node in tree.body if isinstance(node, ast.Assign))
    table = next(node.value for node in assigned if "_DERIVED" in map(ast.unparse, node.targets))
    return {key.value: role.attr for key, role in zip(table.keys, table.values, strict=True)}


def _settings(package: Path) -> Iterator[tuple[str, ast.Call]]:
    """Yield each name in the package's table of settings, and its entry's source."""
    tree = ast.parse((package / "parameters" / "settings.py").read_text())
    table = next(node for node in tree.body if isinstance(node, ast.AnnAssign) and node.target.id == "SETTINGS")
    for key, call in zip(table.value.keys, table.value.values, strict=True):
        yield key.value, call


if __name__ == "__main__":
    sys.exit(write_or_check({PAGE: page(PACKAGE)}, "Make docs/arguments.md from the class and the table of settings."))
