"""The kernel's page on the Hub: `CARD.md`, filled in as the Hub's builder does it."""

from __future__ import annotations

import ast
from pathlib import Path

import jinja2

from tools.build.commands import BuildError


def fill_card(root: Path, tables: dict, package: Path) -> str:
    """Return the text of `root/CARD.md` for the parsed `build.toml`.

    Raises `BuildError` if there is none, or if it uses a name that the builder does not know.
    """
    general = tables["general"]
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    try:
        return environment.from_string((root / "CARD.md").read_text()).render(
            repo_id=general["hub"]["repo-id"],
            version=general["version"],
            functions=public_names(root / package / "__init__.py"),
            layers=None,
            has_benchmark=(root / "benchmarks/benchmark.py").is_file(),
            upstream=general.get("upstream"),
            source=general.get("source"),
            license=general["license"].lower(),
        )
    except (OSError, ValueError, SyntaxError, jinja2.TemplateError) as error:
        raise BuildError(f"CARD.md cannot be filled: {error}") from None


def public_names(init: Path) -> list[str]:
    """Return the strings of the literal `__all__` in `init`, empty if there is none."""
    for statement in ast.parse(init.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return ast.literal_eval(statement.value)
    return []
