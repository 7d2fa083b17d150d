"""What `build.toml` asks for, read by the Hub's parser, with checks for mistakes which that parser lets through."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import tomllib

from tools.build.commands import BuildError

GENERATED_HEADER = "registration.h"
COMPILED = {".cpp", ".cu"}
CUTLASS = "cutlass_4_4"

# Ignoring a key would give another binary than the Hub's builder makes, so unknown keys are errors.
_HONOURED = {
    "general": {"name", "version", "edition", "license", "backends", "hub", "python-depends", "upstream", "source"},
    "torch": {"src", "pyext", "stable-abi"},
    "kernel": {"backend", "depends", "src", "cuda-capabilities"},
}


@dataclass(frozen=True)
class Recipe:
    """One backend's part of `build.toml`. Every path is relative to the repository.

    `links` has the URLs `upstream` and `source` if they are given. `archs` are the architectures of all sections,
    `archs_of` those of one CUDA source.
    """

    name: str
    version: int
    license: str
    backend: str
    torch_abi: str
    links: dict[str, str]
    python_depends: tuple[str, ...]
    archs: tuple[str, ...]
    archs_of: dict[Path, tuple[str, ...]]
    needs_cutlass: bool
    sources: tuple[Path, ...]
    package: Path
    package_files: tuple[Path, ...]

    @property
    def inputs(self) -> tuple[Path, ...]:
        """Every file that goes into the variant or influences it."""
        return (Path("build.toml"), *self.sources, *(self.package / file for file in self.package_files))

    def for_device(self, arch: str) -> Recipe:
        """Return the recipe for one GPU: sources without an architecture of their own are compiled for `arch`."""
        archs_of = {
            source: archs if all(other.endswith("a") for other in archs) else (arch,)
            for source, archs in self.archs_of.items()
        }
        return replace(self, archs=(arch,), archs_of=archs_of)


def read_build(root: Path) -> dict:
    """Return the tables of `root/build.toml`; `BuildError` if the Hub's parser or this driver cannot take it."""
    if not (root / "build.toml").is_file():
        raise BuildError(f"{root} has no build.toml")
    # Imported here, so that a machine without the Hub's package can still read the recipe and build for itself.
    from kernels._rust import Build

    try:
        Build.open(root)
    except ValueError as error:
        raise BuildError(f"build.toml: {' '.join(str(error).split())}") from None
    return read_tables(root)


def read_tables(root: Path) -> dict:
    """Return the tables of `root/build.toml` without the checks of the Hub's parser."""
    tables = tomllib.loads((root / "build.toml").read_text())
    if "torch" not in tables or "repo-id" not in tables["general"].get("hub", {}):
        raise BuildError("build.toml needs a table [torch] and a repo-id in [general.hub]")
    sections = {"general": tables["general"], "torch": tables["torch"]}
    for title, table in {**sections, **{f"kernel.{name}": t for name, t in tables.get("kernel", {}).items()}}.items():
        foreign = sorted(set(table) - _HONOURED[title.split(".")[0]])
        if foreign or not {"torch"} <= set(table.get("depends", ["torch"])) <= {"torch", CUTLASS}:
            named = ", ".join(foreign) or f"depends = {table['depends']}"
            raise BuildError(f"build.toml: [{title}] has {named}, which only the Hub's kernel-builder can build")
    return tables


def read_recipe(root: Path, tables: dict, backend: str) -> Recipe:
    """Return the recipe of `backend`. `BuildError` names every file that is missing."""
    general, torch = tables["general"], tables["torch"]
    sections = [section for section in tables.get("kernel", {}).values() if section["backend"] == backend]
    abi = torch.get("stable-abi", {}).get(backend)
    if not sections or not abi:
        raise BuildError(f"build.toml needs a [kernel] section and a [torch.stable-abi] version for {backend}")
    name = general["name"].replace("-", "_")  # as the Hub's builder does
    package = Path("torch-ext", name)
    recipe = Recipe(
        name=name,
        version=general["version"],
        license=general["license"],
        backend=backend,
        torch_abi=abi,
        links={key: general[key] for key in ("upstream", "source") if key in general},
        python_depends=tuple(general.get("python-depends", ())),
        archs=tuple(_merged(sections, "cuda-capabilities")),
        archs_of=dict(_archs_of_sources(sections)),
        needs_cutlass=CUTLASS in _merged(sections, "depends"),
        sources=tuple(map(Path, _merged([torch, *sections], "src"))),
        package=package,
        package_files=tuple(_package_files(root / package, torch.get("pyext", ["py", "pyi"]))),
    )
    problems = list(_problems(root, recipe))
    if problems:
        raise BuildError("\n".join(problems))
    return recipe


def _merged(sections: list[dict], key: str) -> list[str]:
    """The values of all sections in the order of the file, each once."""
    return list(dict.fromkeys(value for section in sections for value in section.get(key, ())))


def _archs_of_sources(sections: list[dict]) -> Iterator[tuple[Path, tuple[str, ...]]]:
    for section in sections:
        for source in section["src"]:
            if Path(source).suffix == ".cu":
                yield Path(source), tuple(section.get("cuda-capabilities", ()))


def _package_files(package: Path, extensions: list[str]) -> Iterator[Path]:
    """Yield the files that go into a variant. A generated `_ops.py` may be in the tree; it is not one of them."""
    for path in sorted(package.rglob("*")):
        file = path.relative_to(package)
        if path.suffix[1:] in extensions and "__pycache__" not in file.parts and file != Path("_ops.py"):
            yield file


def _problems(root: Path, recipe: Recipe) -> Iterator[str]:
    if Path("__init__.py") not in recipe.package_files:
        yield f"{recipe.package}/__init__.py is missing"
    if (root / recipe.package / recipe.name).exists():
        yield f"{recipe.package / recipe.name} would hide the package: the Hub's builder forbids that name"
    for source in recipe.sources:
        if not (root / source).is_file():
            yield f"{source} is listed in build.toml for {recipe.backend} and does not exist"
        else:
            yield from _header_problems(root, source, recipe)


def _header_problems(root: Path, source: Path, recipe: Recipe) -> Iterator[str]:
    """Headers in quotes that are not listed: the Hub's builder copies only what build.toml lists."""
    listed = {(root / path).resolve() for path in recipe.sources}
    for header in re.findall(r'^\s*#\s*include\s*"([^"]+)"', (root / source).read_text(), re.MULTILINE):
        if header != GENERATED_HEADER and (root / source.parent / header).resolve() not in listed:
            yield f'{source} includes "{header}", which build.toml does not list for {recipe.backend}'
