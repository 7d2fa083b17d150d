"""The Hub's builder without Nix and Rust: its templates rendered, its hooks run, both as a checkout of it has them.

The names of files and of what templates are rendered with are those of kernel-builder/src/pyproject/torch/mod.rs in
huggingface/kernels at 8ac69fc.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomllib
from jinja2 import Environment, FileSystemLoader

from tests.support.hub_clients import digest_again
from tests.support.toy_kernel import git
from tools.build.commands import run

UNIQUE_ID = "rendered"
PYPROJECT = Path("kernel-builder/src/pyproject")
# What goes into the folder cmake/ as it stands.
CMAKE_FILES = (
    *("utils.cmake", "kernel.cmake", "torch/build-variants.cmake", "torch/add_build_metadata.py"),
    *("torch/cuda/hipify.py", "torch/metal/compile-metal.cmake", "torch/metal/metallib_to_header.py"),
    *("torch/get_gpu_lang.cmake", "torch/get_gpu_lang.py", "torch/_ops.py.in"),
)
# Sources a hook and runs what it has registered, as the phases of a build do.
RUN_HOOKS = 'set -e; source "$0"; for hook in "${postUnpackHooks[@]}" "${postInstallCheckHooks[@]}"; do "$hook"; done'


def create_pyproject(checkout: Path, source: Path) -> None:
    """Write into a copy of the repository what `kernel-builder create-pyproject` writes there; FileExistsError if it is
    there already.
    """
    for name, text in generated_files(checkout, source).items():
        (source / name).parent.mkdir(exist_ok=True)
        with (source / name).open("x") as file:
            file.write(text)


def generated_files(checkout: Path, source: Path) -> dict[str, str]:
    """Return what the builder generates for the repository `source`, by name."""
    tables = tomllib.loads((source / "build.toml").read_text())
    general, data = tables["general"], [name for name in tables["torch"]["pyext"] if name != "py"]
    templates = Environment(loader=FileSystemLoader(checkout / PYPROJECT / "templates"), trim_blocks=True)
    names = {"kernel_name": general["name"], "python_name": general["name"], "kernel_unique_id": UNIQUE_ID}

    def rendered(template: str, **values: Any) -> str:
        return templates.get_template(template).render({**names, **values})

    metadata = {key: general[key] for key in ("name", "version", "license", "source")}
    return {
        "CMakeLists.txt": "\n".join(_cmake_parts(checkout, tables, rendered, data)),
        "setup.py": rendered("torch/setup.py", data_globs=", ".join(f'"**/*.{name}"' for name in data)),
        "pyproject.toml": rendered("torch/pyproject.toml", python_dependencies="", backend_dependencies=[]),
        "torch-ext/registration.h": (checkout / PYPROJECT / "templates/torch/registration.h").read_text(),
        **{f"cmake/{Path(name).name}": (checkout / PYPROJECT / "templates" / name).read_text() for name in CMAKE_FILES},
        **{
            f"metadata-{backend}.json": json.dumps(
                {
                    **metadata,
                    "id": f"_{general['name']}_{backend}_{UNIQUE_ID}",
                    "python-depends": [],
                    "backend": {"type": backend},
                }
            )
            for backend in general["backends"]
        },
    }


def _cmake_parts(checkout: Path, tables: Mapping[str, Any], rendered: Any, data: list[str]) -> list[str]:
    """Return the parts of CMakeLists.txt: preamble, dependencies, binding, kernels, extension."""
    torch, kernels = tables["torch"], tables["kernel"]
    stable = [{"backend": backend, "version": version} for backend, version in torch["stable-abi"].items()]
    parts = [rendered("torch/preamble.cmake", stable_abi=stable)]
    versions = {_cutlass_version(checkout, name) for kernel in kernels.values() for name in kernel["depends"]}
    parts += [rendered("cuda/dep-cutlass.cmake", version=version) for version in versions - {None}]
    parts.append(rendered("torch/torch-binding.cmake", name=tables["general"]["name"], src=torch["src"]))
    for name, kernel in kernels.items():
        sources = "\n".join(f'"{source}"' for source in kernel["src"])
        archs = kernel.get("cuda-capabilities")
        component = f"kernel-component/{kernel['backend']}.cmake"
        parts.append(rendered(component, name=name, kernel_name=name, sources=sources, cuda_capabilities=archs))
    return [*parts, rendered("torch/torch-extension.cmake", data_extensions=data), ""]


def _cutlass_version(checkout: Path, dependency: str) -> str | None:
    """Return the version that the CMake looks for, by a dependency such as `cutlass_4_5`; None if it looks for none."""
    name = dependency.replace("cutlass_", "Dependency::Cutlass")
    text = (checkout / PYPROJECT / "deps.rs").read_text()
    match = re.search(rf'{name} => (?:(?!Dependency::).)*?version => "([\d.]+)"', text, re.S)
    return match and match[1]


def build(source: Path) -> Path:
    """Build a repository with its generated files by CMake and ninja, and return the folder of its one variant."""
    command = [sys.executable, "setup.py", "build_kernel"]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (variant,) = (source / "build").glob("torch-*")
    return variant


def build_noarch(checkout: Path, tree: Path) -> list[Path]:
    """Build what `tools.build.noarch_tree` has made, a repository, by the builder's templates; return the variants.

    The names and the commit are those that nix-builder/lib/gen-flake-outputs.nix gives; then the digest is added.
    """
    general = tomllib.loads((tree / "build.toml").read_text())["general"]
    commit, templates = git(tree, "rev-parse", "HEAD").strip(), checkout / PYPROJECT / "templates/torch/noarch"
    names = {"kernel_name": general["name"], "kernel_unique_id": commit[:7]}
    ops = Environment(trim_blocks=True).from_string((templates / "_ops.py").read_text()).render(names)
    (tree / "torch-ext" / general["name"] / "_ops.py").write_text(ops)
    shutil.copyfile(templates / "setup.py", tree / "setup.py")
    for backend in general["backends"]:
        metadata = {
            **{key: general[key] for key in ("name", "version", "license", "source")},
            "id": f"_{general['name']}_{backend}_{commit[:7]}",
            "python-depends": [],
            "backend": {"type": backend},
            "provenance": {"kernel-builder": {"version": "0"}, "kernel": {"commit": commit, "dirty": False}},
        }
        (tree / f"metadata-{backend}.json").write_text(json.dumps(metadata))
        run([sys.executable, "setup.py", "build_kernel", "--backend", backend], cwd=tree)
    made = sorted((tree / "build").glob("torch-*"))
    for variant in made:
        digest_again(variant)
    return made


def run_hook(hook: Path, folder: Path, substitutions: Mapping[str, str], variables: Mapping[str, str]) -> str:
    """Run a hook script, in which Nix replaces `@name@`, in `folder`, and return its status and what it prints."""
    text = hook.read_text()
    for name, value in substitutions.items():
        text = text.replace(f"@{name}@", value)
    (folder / hook.name).write_text(text)
    command = ["bash", "-c", RUN_HOOKS, str(folder / hook.name)]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return f"status {done.returncode}\n{done.stdout}{done.stderr}"
