"""What a variant holds, what stops a build before it starts, and that a failed one changes nothing."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.toy_kernel import commit, git, write_toy_kernel
from tools.build import compilers, source_tree, variant_metadata, variants
from tools.build.commands import BuildError

needs_nvcc = pytest.mark.skipif(compilers.find_nvcc() is None, reason="there is no nvcc")
CPU = "torch-stable-abi211-cpu-x86_64-linux"
NOARCH = ["torch-cpu", "torch-cuda", "torch-rocm", "torch-metal", "torch-xpu"]


def build_cpu(toy: Path, output: Path):
    (built,) = variants.build_variants(toy, ["cpu"], output)
    return built


def contents(variant: Path) -> dict[str, bytes]:
    return {str(file.relative_to(variant)): file.read_bytes() for file in variant.rglob("*") if file.is_file()}


def edit(file: Path, old: str, new: str) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def test_variant_holds_package_library_and_generated_files(toy, tmp_path):
    """A stale generated file in the package is replaced."""
    (toy / "torch-ext/toy/_ops.py").write_text("stale = True\n")
    built = build_cpu(toy, tmp_path / "out")
    assert built.path == tmp_path / "out" / CPU
    assert set(contents(built.path)) == {
        "__init__.py",
        "_ops.py",
        "data/sizes.json",
        "metadata.json",
        f"{built.ops}.abi3.so",
    }
    assert "stale" not in (built.path / "_ops.py").read_text()
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == ["CARD.md", CPU]


def test_card_template_is_filled(toy, tmp_path):
    build_cpu(toy, tmp_path / "out")
    assert (tmp_path / "out/CARD.md").read_text().strip() == "org/toy 3 ['_ops']"


def test_unknown_card_placeholder_is_refused(toy, tmp_path):
    """Nothing is written then."""
    edit(toy / "CARD.md", "{{ repo_id }}", "{{ repository }}")
    with pytest.raises(BuildError, match="'repository' is undefined"):
        build_cpu(toy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_metadata_records_build_and_provenance(toy, tmp_path):
    edit(toy / "build.toml", "version = 3", 'version = 3\nsource = "https://example.org/toy"')
    commit(toy)
    built = build_cpu(toy, tmp_path / "out")
    metadata = variant_metadata.read_metadata(built.path)
    commit_id, tree = git(toy, "rev-parse", "HEAD", "HEAD^{tree}").split()
    assert (str(metadata.name), metadata.id, metadata.version) == ("toy", f"_toy_cpu_{tree[:7]}", 3)
    assert (metadata.license, metadata.python_depends) == ("Apache-2.0", [])
    assert (metadata.source, metadata.upstream) == ("https://example.org/toy", None)
    assert (str(metadata.backend.backend_type), metadata.backend.archs) == ("cpu", None)
    assert (metadata.provenance.kernel.commit, metadata.provenance.dirty) == (commit_id, False)
    assert metadata.provenance.kernel_builder.version == variant_metadata.BUILDER_VERSION
    assert set(metadata.digest.files) == set(contents(built.path)) - {"metadata.json"}
    assert metadata.digest.files == variant_metadata.digest_of(built.path).files


@pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=needs_nvcc)])
def test_two_builds_of_one_commit_are_byte_identical(toy, tmp_path, backend):
    first, second = (contents(variants.build_variants(toy, [backend], tmp_path / "out")[0].path) for _ in range(2))
    assert first == second


def test_cpu_build_is_independent_of_repository_path(toy, tmp_path):
    elsewhere = shutil.copytree(toy, tmp_path / "another/place")
    first, second = build_cpu(toy, tmp_path / "out").path, build_cpu(elsewhere, tmp_path / "elsewhere").path
    assert contents(first) == contents(second)


def test_changed_tracked_file_makes_the_build_dirty(toy, tmp_path):
    edit(toy / "CARD.md", "{{ repo_id }}", "The {{ repo_id }}")
    built = build_cpu(toy, tmp_path / "out")
    assert built.ops.endswith("_dirty")
    assert variant_metadata.read_metadata(built.path).provenance.kernel.dirty


def test_untracked_file_makes_build_dirty_only_if_packed(toy, tmp_path):
    (toy / "torch-ext/toy/notes.md").write_text("Not packed.\n")
    assert not build_cpu(toy, tmp_path / "out").ops.endswith("_dirty")
    (toy / "torch-ext/toy/more.py").touch()
    assert build_cpu(toy, tmp_path / "out").ops.endswith("_dirty")


def test_failed_compile_leaves_the_old_variant(toy, tmp_path):
    """The error names the file, the line and the cause."""
    before = contents(build_cpu(toy, tmp_path / "out").path)
    edit(toy / "toy_cpu/toy.cpp", "return value;", "return missing_name;")
    with pytest.raises(BuildError, match=r"toy_cpu/toy\.cpp:6.*error: .missing_name. was not declared"):
        build_cpu(toy, tmp_path / "out")
    assert contents(tmp_path / "out" / CPU) == before


def test_one_failed_variant_leaves_the_whole_output_unchanged(toy, tmp_path, monkeypatch):
    """The second job is a CPU variant, too, so that this needs no nvcc."""
    plan = variants.plan

    def plan_twice(root, tables, backend, work, machine):
        job = plan(root, tables, "cpu", work, machine)
        return replace(job, work=work / backend)

    monkeypatch.setattr(variants, "plan", plan_twice)
    build_cpu(toy, tmp_path / "out")
    before = contents(tmp_path / "out")
    edit(toy / "CARD.md", "{{ repo_id }}", "The {{ repo_id }}")
    strip = variants.strip
    monkeypatch.setattr(
        variants,
        "strip",
        lambda library, machine: library.unlink() if "cuda" in str(library) else strip(library, machine),
    )
    with pytest.raises(OSError, match=r"abi3\.so"):
        variants.build_variants(toy, ["cpu", "cuda"], tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_failed_move_undoes_all_moves(tmp_path):
    output, made = tmp_path / "out", tmp_path / "made"
    for folder, text in (output, "old"), (made, "new"):
        (folder / "variant").mkdir(parents=True)
        (folder / "variant/file").write_text(text)
        (folder / "card").write_text(text)
    before, new = contents(output), [made / "variant", made / "card"]
    # A folder cannot be replaced by the file that is moved away from here.
    (made / "card.replaced").mkdir()
    with pytest.raises(OSError, match="card"):
        variants.put_in_place(new, output)
    assert contents(output) == before

    (made / "card.replaced").rmdir()
    variants.put_in_place(new, output)
    assert set(contents(output).values()) == {b"new"}


@pytest.mark.parametrize(
    ("file", "old", "new", "complaint"),
    [
        ("build.toml", "toy_cpu/toy.cpp", "toy_cpu/absent.cpp", "toy_cpu/absent.cpp is listed .* does not exist"),
        ("build.toml", ', "toy_cpu/toy.h"', "", 'includes "toy.h", which build.toml does not list for cpu'),
        ("build.toml", 'backend = "cpu"\n', 'backend = "cpu"\ncxx-flags = ["-O0"]\n', "kernel.toy_cpu. has cxx-flags"),
        ("build.toml", "edition = 5", "edition = 5\nauthor = 1", "Unknown field author"),
        ("build.toml", "cpu = ", "xpu = ", "needs .* a .torch.stable-abi. version for cpu"),
        ("build.toml", 'cpu = "2.11"', 'cpu = "9.0"', "torch .* is older than the stable ABI 9.0"),
    ],
    ids=["missing source", "unlisted header", "flag not honoured", "unknown key", "no version", "torch too old"],
)
def test_mistake_in_build_toml_is_named(toy, tmp_path, file, old, new, complaint):
    edit(toy / file, old, new)
    with pytest.raises(BuildError, match=complaint):
        build_cpu(toy, tmp_path / "out")
    assert not list((tmp_path / "out").glob("torch*"))


def test_folder_outside_git_is_refused(toy, tmp_path):
    shutil.rmtree(toy / ".git")
    with pytest.raises(BuildError, match="has to be a git repository with a commit"):
        build_cpu(toy, tmp_path / "out")


def test_without_nvcc_cuda_is_skipped_or_refused_if_named(toy, monkeypatch, capsys):
    monkeypatch.setattr(compilers.shutil, "which", lambda program, path=None: None)
    monkeypatch.setattr(variants, "ROOT", toy)
    monkeypatch.setattr("sys.argv", ["variants"])
    assert variants.main() == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "cuda is skipped: there is no nvcc; install the CUDA 13 toolkit" in said
    assert sorted(folder.name for folder in (toy / "build").glob("torch*")) == sorted([*NOARCH, CPU])

    monkeypatch.setattr("sys.argv", ["variants", "--backend", "cuda"])
    assert variants.main() == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_nvcc_of_another_cuda_release_is_refused(toy, tmp_path, monkeypatch):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text('#!/bin/sh\necho "Cuda compilation tools, release 12.6, V12.6.20"\n')
    nvcc.chmod(0o755)
    monkeypatch.setattr(compilers.shutil, "which", lambda program: str(nvcc))
    with pytest.raises(BuildError, match=r"release 12\.6; install the CUDA 13 toolkit"):
        variants.build_variants(toy, ["cuda"], tmp_path / "out")


@needs_nvcc
def test_cuda_builds_in_a_path_with_spaces(toy, tmp_path):
    (built,) = variants.build_variants(toy.rename(tmp_path / "a toy"), ["cuda"], tmp_path / "the output")
    assert b"/a toy/" not in (built.path / f"{built.ops}.abi3.so").read_bytes()


def test_path_with_a_comma_is_refused_for_nvcc(toy, tmp_path, monkeypatch):
    """nvcc would divide it there; the refusal comes before anything is compiled."""
    monkeypatch.setattr(variants, "find_cuda", lambda: compilers.Cuda("nvcc", Path("/cuda"), "13.0"))
    with pytest.raises(BuildError, match=r"nvcc cannot take a path with ',' in it: .*/one,two"):
        variants.build_variants(toy, ["cuda"], tmp_path / "one,two")
    assert not (tmp_path / "one,two").exists()


def test_git_hook_variables_do_not_redirect_git(toy, tmp_path, monkeypatch):
    """git sets them for the hooks that it runs, and tests are what a hook runs."""
    another = write_toy_kernel(tmp_path / "another")
    (another / "more.txt").touch()
    commit(another)
    before = git(another, "log", "--all", "--format=%H")
    monkeypatch.setenv("GIT_DIR", str(another / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(another))
    monkeypatch.setenv("GIT_INDEX_FILE", str(another / ".git/index"))
    third = write_toy_kernel(tmp_path / "third")
    heads = [source_tree.read_revision(root, [Path("build.toml")]).commit for root in (toy, third)]
    monkeypatch.undo()
    assert heads == [git(root, "rev-parse", "HEAD").strip() for root in (toy, third)]
    assert git(another, "log", "--all", "--format=%H") == before


def test_second_build_into_a_folder_waits_for_the_first(tmp_path):
    def enter():
        with variants.work_folder(tmp_path):
            pass

    second = threading.Thread(target=enter, daemon=True)
    with variants.work_folder(tmp_path) as work:
        second.start()
        second.join(0.2)
        assert second.is_alive() and work.exists()
    second.join(10)
    assert not second.is_alive() and not work.exists()


def test_equal_trees_have_equal_names_across_commits(toy, tmp_path):
    first = build_cpu(toy, tmp_path / "out").ops
    (toy / "more.txt").touch()
    commit(toy)
    assert build_cpu(toy, tmp_path / "out").ops != first
    (toy / "more.txt").unlink()
    commit(toy)
    assert build_cpu(toy, tmp_path / "out").ops == first
