"""Imports point down the floors, none hides in a function, and the package needs torch and triton alone."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "torch-ext" / "optimizer"
FLOORS = [
    {"schedules", "learning_rate", "parameters", "matrices", "attention", "partition", "offload"},
    {"kernels", "stability", "state", "state_sources"},
    {"iteration"},
    {"polar", "rules", "routing"},
    {"distributed", "param_groups"},
    {"claims", "telemetry"},
    {"updates", "clipping"},
    {"planned_optimizer", "explanation"},
    {"muon"},
    {"compat", "state_import", "trainer"},
    {"__init__"},
]
# Inside a folder a file imports only from those before it; so rules import none of each other.
ORDERS = {
    "kernels": [{"native", "tiles", "tuned", "panels"}, {"symmetric_gemm"}, {"small_polar"}, {"gemms"}],
    "rules": [{"fallback"}, {"momentum", "descent", "adamw", "nadamw", "qk_clip"}],
    "distributed": [
        {"placement", "plan"},
        {"shards", "agreement"},
        {"messages"},
        {"exchange"},
        {"exchange_plan"},
        {"pipeline"},
        {"held"},
        {"sharded"},
        {"summed"},
    ],
}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "_ops.py")


def level(part, floors):
    found = [i for i, names in enumerate(floors) if part in names]
    assert found, f"{part} stands on no floor: give it one here and in docs/architecture.md"
    return found[0]


def parts(path):
    return path.relative_to(PACKAGE).with_suffix("").parts


def relative_imports(path):
    """The modules of this package that `path` imports, as parts from its top."""
    folder = parts(path)[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = folder[: len(folder) - node.level + 1]
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
    """Import statements of the module itself; one guarded by try counts, where a package may be missing."""
    for node in tree.body:
        yield from node.body if isinstance(node, ast.Try) else [node]


@pytest.mark.parametrize("path", FILES, ids=lambda path: "/".join(parts(path)))
def test_imports_point_down(path):
    own = parts(path)
    for other in relative_imports(path):
        if other == ("_ops",):
            assert own == ("kernels", "native"), "only kernels/native.py imports the compiled ops"
        elif other[0] != own[0]:
            assert level(other[0], FLOORS) < level(own[0], FLOORS), f"{own} imports {other} from its floor or above"
        else:
            order = ORDERS[own[0]]
            assert level(other[1], order) < level(own[1], order), f"{own} imports {other} from beside or above it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: "/".join(parts(path)))
def test_imports_stand_at_the_top_and_need_only_torch(path):
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert all(any(node is top for top in at_the_top(tree)) for node in imports)
    guarded = any(isinstance(node, ast.Try) for node in tree.body)
    assert not guarded or parts(path) == ("kernels", "gemms"), "kernels/gemms.py alone guards an import"
    roots = {name.split(".")[0] for name in absolute_imports(tree)}
    assert roots - set(sys.stdlib_module_names) <= {"torch", "triton"}
    floor = level(parts(path)[0], FLOORS)
    for name in absolute_imports(tree):
        assert floor >= 3 or not name.startswith("torch.distributed"), "floors 0 to 2 know no process group"
        assert floor >= 4 or not name.startswith("torch.optim"), "floors 0 to 3 know no optimizer"
        assert floor >= 1 or not name.startswith("triton"), "floor 0 runs without triton"


def test_nothing_reads_the_environment_or_hides_behind_a_module_of_its_name():
    for path in FILES:
        assert "environ" not in path.read_text() and "getenv" not in path.read_text(), path
    assert "optimizer" not in {part for path in FILES for part in parts(path)}


def test_every_public_name_is_listed_once_in_one_literal():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    modules = {parts(path)[0] for path in FILES} - {"__init__"}
    # Modules may be reached as attributes without being part of the versioned surface.
    assert names == sorted(set(names)) and set(names) == imported - modules
    # A module `muon` beside the class `Muon` is fine; a module of a public name would hide it.
    assert not modules & set(names)
