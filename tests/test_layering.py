"""Imports point down the floors, none hides in a function, and the package needs torch and triton alone.

Floors are the folders and files at the top of the package, by name. Inside a floor imports may not go round, and some
of its folders import nothing else of it.
"""

import ast
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "torch-ext" / "optimizer"
FLOORS = [
    {"schedules", "learning_rate"},
    {"kernels"},
    {"stability", "iteration", "polar"},
    {"tuning"},
    {"rules"},
    {"parameters"},
    {"plan"},
    {"step", "qk_clip"},
    {"explain"},
    {"muon"},
    {"interop"},
    {"__init__"},
]
# Folders inside a floor that know nothing else of it.
SELF_CONTAINED = {("interop", "models"), ("step", "agreement")}
IMPORTS = (ast.Import, ast.ImportFrom)
# What alone may import under a condition, by the statement of the condition: Triton and a library may be missing.
GUARDS = {ast.Try: ("kernels", "products"), ast.If: ("kernels", "native")}
# The lowest floor that may know a library, by a name on it.
LOWEST = {"torch.distributed": "plan", "torch.optim": "muon", "triton": "kernels"}


def floor(part):
    floors = [i for i, names in enumerate(FLOORS) if part in names]
    assert floors, f"{part} stands on no floor: give it one here and in docs/architecture.md"
    return floors[0]


def files_of(package):
    return sorted(path for path in package.rglob("*.py") if path.name != "_ops.py")


def relative_imports(module, tree):
    """The modules of the package that `module` imports, as parts from the package's top."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = module[: len(module) - node.level]
            names = [tuple(node.module.split("."))] if node.module else [(alias.name,) for alias in node.names]
            yield from ((*base, *name) for name in names)


def absolute_imports(tree):
    """The dotted names that a file imports from outside, with what it takes out of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_the_top(tree):
    """Import statements of the module itself, with those under a condition that `GUARDS` has."""
    for node in tree.body:
        yield from node.body if type(node) in GUARDS else [node]


def texts_of(package):
    """The package's files, by their parts from its top."""
    return {path.relative_to(package).with_suffix("").parts: path.read_text() for path in files_of(package)}


@cache  # a planted violation changes one file
def read(module, text):
    """Return which modules of the package a file imports, and what breaks a rule in it, as sentences."""
    tree = ast.parse(text, feature_version=(3, 9))
    below = {other for other in relative_imports(module, tree) if other != ("_ops",)}
    breaches = [f"{module} imports {o} from above" for o in below if floor(o[0]) > floor(module[0])]
    breaches += [
        f"{module} imports {o}, and {'/'.join(module[:2])} is self-contained"
        for o in below
        if module[:2] in SELF_CONTAINED and o[0] == module[0] and o[:2] != module[:2]
    ]
    breaches += [
        f"{module} imports {name}, which begins with {LOWEST[library]}"
        for name in absolute_imports(tree)
        for library in LOWEST
        if name.startswith(library) and floor(module[0]) < floor(LOWEST[library])
    ]
    if ("_ops",) in relative_imports(module, tree) and module != ("kernels", "native"):
        breaches.append(f"{module} imports the compiled ops, which kernels/native.py alone does")
    imports = [node for node in ast.walk(tree) if isinstance(node, IMPORTS)]
    breaches += [f"{module} hides an import" for node in imports if all(node is not top for top in at_the_top(tree))]
    guarded = [
        node for node in tree.body if type(node) in GUARDS and any(isinstance(inner, IMPORTS) for inner in node.body)
    ]
    breaches += [
        f"{module} guards an import, which {'/'.join(GUARDS[type(node)])}.py alone does"
        for node in guarded
        if module != GUARDS[type(node)]
    ]
    roots = {name.split(".")[0] for name in absolute_imports(tree)}
    breaches += [f"{module} needs {root}" for root in roots - set(sys.stdlib_module_names) - {"torch", "triton"}]
    return frozenset(below), tuple(breaches)


def violations(texts):
    """Return what breaks a rule in the package's files, as sentences."""
    graph, breaches = {}, []
    for module, text in texts.items():
        graph[module], broken = read(module, text)
        breaches += broken
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        breaches.append(f"imports go round: {error.args[1]}")
    return breaches


def test_imports_point_down_the_floors():
    assert violations(texts_of(PACKAGE)) == []


PLANTED = {
    "an optimizer below muon": ("step/update.py", "from torch.optim import Optimizer", "begins with muon"),
    "an optimizer in the mathematics": ("polar/factors.py", "import torch.optim", "begins with muon"),
    "process groups below the plan": ("parameters/state.py", "import torch.distributed as dist", "begins with plan"),
    "a process group's name in a rule": ("rules/momentum.py", "from torch import distributed", "begins with plan"),
    "an import from above": ("plan/owners.py", "from ..step import update", "from above"),
    "a circle inside a floor": ("plan/owners.py", "from . import messages", "go round"),
    "a hidden import": ("polar/factors.py", "def late():\n    import math", "hides an import"),
    "a guard": ("iteration.py", "try:\n    import math\nexcept ImportError:\n    pass", "kernels/products.py alone"),
    "a condition": ("kernels/products.py", "if torch:\n    import math", "kernels/native.py alone"),
    "process groups in the tuning": ("tuning/race.py", "import torch.distributed", "begins with plan"),
    "a step in what ranks compare": ("step/agreement/copies.py", "from ..change import Change", "is self-contained"),
    "another library": ("muon.py", "import numpy", "needs numpy"),
    "triton below the kernels": ("schedules.py", "import triton", "begins with kernels"),
    "the compiled ops elsewhere": ("rules/descent.py", "from .._ops import ops", "kernels/native.py alone"),
}


@pytest.mark.parametrize("why", PLANTED)
def test_a_planted_violation_is_found(why):
    file, line, complaint = PLANTED[why]
    texts = texts_of(PACKAGE)
    texts[tuple(file.removesuffix(".py").split("/"))] += f"\n\n{line}\n"
    assert any(complaint in text for text in violations(texts))


def test_no_module_reads_the_environment():
    """But for the folder of the user's caches, which is the system's convention and no switch of this package."""
    for path in files_of(PACKAGE):
        text = path.read_text()
        if path == PACKAGE / "kernels/speeds/measurement_file.py":
            text = text.replace('os.environ.get("XDG_CACHE_HOME", "")', "", 1)
        assert "environ" not in text and "getenv" not in text, path


def test_no_module_is_called_optimizer():
    """A variant may hold a compatibility folder of that name, which would hide it."""
    assert "optimizer" not in {part for path in files_of(PACKAGE) for part in path.relative_to(PACKAGE).parts}


def test_every_public_name_is_listed_once():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    modules = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in files_of(PACKAGE)} - {"__init__"}
    assert names == sorted(set(names)) and set(names) == imported
    # A module `muon` beside the class `Muon` is fine; a module of a public name would hide it.
    assert not modules & set(names)


def test_a_reader_meets_at_most_sixteen_rooms():
    assert len({path.relative_to(PACKAGE).parts[0] for path in files_of(PACKAGE)}) <= 16
