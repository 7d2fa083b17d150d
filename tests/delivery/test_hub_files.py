"""The files that the Hub's builder reads, and the rule it has for the names of operators."""

from __future__ import annotations

import ast
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import kernels
import pytest
import torch

from tests.support.builders_copy import files_of_builder
from tools.build import card, recipe

NAMED_BY_STRING = {
    "custom_op", "triton_op", "define", "impl", "get_kernel", "register_kernel", "register_fake", "register_autograd",
    "register_autocast", "register_vmap", "register_torch_dispatch", "impl_abstract",
}  # fmt: skip


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_build_toml_lists_every_file_that_a_backend_needs(repository, backend):
    kernel_recipe = recipe.read_recipe(repository, recipe.read_build(repository), backend)
    assert kernel_recipe.torch_abi == "2.11"
    assert kernel_recipe.python_depends == ()


def test_the_cuda_variant_has_the_kernels_of_the_cpu_too(repository):
    tables = recipe.read_build(repository)
    cpu, cuda = (recipe.read_recipe(repository, tables, backend) for backend in ("cpu", "cuda"))
    assert set(cpu.sources) < set(cuda.sources)
    assert cuda.archs == ("7.5", "8.0+PTX", "9.0", "10.0+PTX", "9.0a")


@pytest.mark.skipif(shutil.which("nix-instantiate") is None, reason="there is no nix-instantiate")
def test_the_flake_parses(repository):
    command = ["nix-instantiate", "--parse", str(repository / "flake.nix")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_card_names_version_functions_and_consent(repository):
    tables = recipe.read_build(repository)
    text = card.fill_card(repository, tables, Path("torch-ext/optimizer"))
    assert text.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n")
    assert text.index("trust_remote_code=True") < text.index("## How to use")
    assert f'get_kernel("{tables["general"]["hub"]["repo-id"]}", version=0, trust_remote_code=True)' in text
    for name in card.public_names(repository / "torch-ext/optimizer/__init__.py"):
        assert f"\n- `{name}`\n" in text


def test_the_loader_accepts_the_variant_and_finds_its_ops(variant, native_backend):
    kernel = kernels.get_local_kernel(variant.parent, backend=native_backend)
    (library,) = variant.glob("*.abi3.so")
    assert Path(kernel.__file__) == variant / "__init__.py"
    assert hasattr(torch.ops, library.name.split(".")[0])


def unprefixed_names(tree: ast.AST, decorators_alone: bool = False) -> Iterator[str]:
    """Registrations whose operator name is not add_op_namespace_prefix(...): two builds would collide on it.

    The Hub's builder refuses such decorators on any object, also `op.register_kernel("cpu")`, whose operator has a name
    already (huggingface/kernels at 8ac69fc, nix-builder/pkgs/torch-ops-check). It looks at those of a module's own
    functions and classes, which are some of these, and not at other calls. `test_hub_builder.py` runs it.
    """
    decorators = {id(each) for node in ast.walk(tree) for each in getattr(node, "decorator_list", ())}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        owner, _, function = ast.unparse(node.func).rpartition(".")
        called = not decorators_alone and owner in ("", "torch.library", "library")
        named = id(node) in decorators or called
        if function in NAMED_BY_STRING and named:
            name = node.args[0]
            prefixed = isinstance(name, ast.Call) and ast.unparse(name.func) == "add_op_namespace_prefix"
            if not prefixed:
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_no_file_that_the_builder_copies_decorates_by_a_plain_name(repository):
    """The builder's hook looks at the tests, too."""
    files = [file for file in files_of_builder(repository) if file.endswith(".py")]
    assert {Path(file).parts[0] for file in files} == {"torch-ext", "tests"}
    for file in files:
        tree = ast.parse((repository / file).read_text())
        assert not list(unprefixed_names(tree, decorators_alone=True)), file


def test_every_operator_name_goes_through_the_namespace(repository):
    for file in sorted((repository / "torch-ext").rglob("*.py")):
        tree = ast.parse(file.read_text())
        assert not list(unprefixed_names(tree)), file
        defined = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        assert file.name == "_ops.py" or "add_op_namespace_prefix" not in defined, f"{file} hides what is generated"


@pytest.mark.parametrize(
    ("code", "clean"),
    [
        ('@torch.library.custom_op(add_op_namespace_prefix("f"), mutates_args=())\ndef f(): pass', True),
        ('@register_fake(add_op_namespace_prefix("f"))\ndef f(): pass', True),
        ("@f.register_fake\ndef g(): pass", True),
        ("f.register_autograd(backward)", True),
        ('@f.register_kernel("cpu")\ndef g(): pass', False),
        ('@torch.library.register_kernel(add_op_namespace_prefix("f"), "cpu")\ndef g(): pass', True),
        ('@torch.library.custom_op("optimizer::f", mutates_args=())\ndef f(): pass', False),
        ('register_fake(prefix("f"))', False),
        ('torch.library.register_autograd(add_op_namespace_prefix("f") + "_", backward)', False),
    ],
)
def test_the_rule_for_names_sees_what_it_forbids(code, clean):
    assert (not list(unprefixed_names(ast.parse(code)))) == clean
