"""The workflows of GitHub Actions have the least rights, and the linters that say so find what is planted.

Both linters work without a network: zizmor knows the risks, check-jsonschema the form.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.delivery.test_target_stack import STACKS
from tools.build.released import COMPILED

ACTION = re.compile(r"uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+){0,2}\n")
FOLDERS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
LINTERS = {
    "zizmor": ("zizmor", "--offline", "--quiet", "--persona", "auditor", "--format", "plain"),
    "check-jsonschema": ("check-jsonschema", "--builtin-schema", "vendor.github-workflows"),
}
TRIGGERS = {
    "release.yml": {"push"},
    "test.yml": {"push", "pull_request"},
    "weekly.yml": {"schedule", "workflow_dispatch"},
}
# What one line becomes, the linter that finds it, and how that calls it.
PLANTED = {
    "a template in a script": ('printf "%s" "$TAG"', 'echo "${{ github.ref_name }}"', "zizmor", "template-injection"),
    "an action by its tag": (
        "actions/setup-python@5fda3b95a4ea91299a34e894583c3862153e4b97",
        "actions/setup-python@v7",
        "zizmor",
        "unpinned-uses",
    ),
    "rights of pull requests from forks": (
        "  pull_request:\n",
        "  pull_request_target:\n",
        "zizmor",
        "dangerous-triggers",
    ),
    "all rights": ("permissions: {}", "permissions: write-all", "zizmor", "excessive-permissions"),
    "credentials left in the folder": (
        "persist-credentials: false",
        "persist-credentials: true",
        "zizmor",
        "artipacked",
    ),
    "a misspelt key": ("timeout-minutes:", "time-out-minutes:", "check-jsonschema", "time-out-minutes"),
}


def workflows(repository: Path) -> dict[str, Path]:
    return {file.name: file for file in sorted((repository / ".github/workflows").iterdir())}


def lint(linter: str, *files: Path) -> tuple[int, str]:
    """Return the exit status and the output of a linter; FileNotFoundError if it is not installed."""
    name, *options = LINTERS[linter]
    command = [shutil.which(name, path=FOLDERS) or name, *options, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("linter", LINTERS)
def test_a_linter_finds_nothing(repository, linter):
    status, output = lint(linter, *workflows(repository).values())
    assert status == 0, output


@pytest.mark.parametrize("fault", PLANTED)
def test_a_linter_finds_what_is_planted(repository, tmp_path, fault):
    good, bad, linter, finding = PLANTED[fault]
    text = (repository / ".github/workflows/test.yml").read_text()
    text = text.replace("run: make test\n", 'run: make test\n      - run: printf "%s" "$TAG"\n')
    (tmp_path / ".github/workflows").mkdir(parents=True)
    planted = tmp_path / ".github/workflows/planted.yml"
    planted.write_text(text)
    assert good in text and lint(linter, planted)[0] == 0
    planted.write_text(text.replace(good, bad))
    status, output = lint(linter, planted)
    assert status != 0 and finding in output


def test_every_action_is_a_commit_with_its_version_beside_it(repository):
    for file in workflows(repository).values():
        text = file.read_text()
        assert len(ACTION.findall(text)) == text.count("uses: ") > 0, file


def test_secrets_and_identities_are_the_publishing_jobs_alone(repository):
    """It waits for the environment's approval, and runs nothing that pull requests can change."""
    for name, file in workflows(repository).items():
        workflow = yaml.safe_load(file.read_text())
        assert workflow["permissions"] == {}
        for job in workflow["jobs"].values():
            publishes = job.get("environment") == "hub"
            assert ("secrets." in str(job)) == publishes
            assert job["permissions"] == {"contents": "read", **({"id-token": "write"} if publishes else {})}
            assert name == "release.yml" or not publishes
        assert set(workflow[True]) == TRIGGERS[name]  # YAML reads `on` as a truth value


def test_pull_requests_are_tested_with_the_oldest_and_the_newest_torch(repository):
    workflow = yaml.safe_load(workflows(repository)["test.yml"].read_text())
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]["include"]
    assert {row["torch"]: row["triton"] for row in matrix} == STACKS


def test_a_release_has_the_variants_that_are_promised(repository):
    """Each is built on its machine, and those without a library once; none besides."""
    jobs = yaml.safe_load(workflows(repository)["release.yml"].read_text())["jobs"]
    rows = jobs["build"]["strategy"]["matrix"]["include"]
    built = {name: row["system"] for row in rows for name in row["variants"].split()}
    assert sorted(built) == sorted(COMPILED)
    assert [name for name, system in built.items() if not name.endswith(f"-{system}")] == []
    scripts = [step.get("run", "") for step in jobs["build"]["steps"]]
    assert sum(".#redistributable.$variant" in script for script in scripts) == 1
    assert not any(".#bundle" in script for script in scripts)
    assert sum("--backend noarch" in script for script in scripts) == 1


def steps_after_python(job: dict) -> list[dict]:
    uses = [step.get("uses", "").split("@")[0] for step in job["steps"]]
    return job["steps"][uses.index("actions/setup-python") :]


def test_what_is_set_up_has_a_chosen_python_and_torch_for_cpus(repository):
    """PyPI's torch comes with CUDA, which is gigabytes, and no runner has a GPU."""
    counts = {}
    for name, file in workflows(repository).items():
        jobs = yaml.safe_load(file.read_text())["jobs"].values()
        steps = [step for job in jobs for step in steps_after_python(job) if "make setup" in step.get("run", "")]
        assert all(step["env"]["PIP_EXTRA_INDEX_URL"] == "https://download.pytorch.org/whl/cpu" for step in steps)
        counts[name] = len(steps)
        assert counts[name] == file.read_text().count("make setup"), "one comes before the Python"
    assert counts == {"release.yml": 2, "test.yml": 1, "weekly.yml": 1}


def test_every_suite_of_a_week_is_one_of_the_makefile(repository):
    """Those that every change runs, or that need what no runner has, are not among them."""
    (job,) = yaml.safe_load(workflows(repository)["weekly.yml"].read_text())["jobs"].values()
    targets = re.findall(r"^([\w-]+):", (repository / "Makefile").read_text(), re.MULTILINE)
    suites = {name for name in targets if re.match("test-|lint-", name)}
    assert set(job["strategy"]["matrix"]["suite"]) == suites - {"test-builder"}


class ParsedError(Exception):
    """A program has taken its arguments."""


def parsed(parse: Callable) -> Callable:
    def stop(*arguments: object) -> None:
        parse(*arguments)
        raise ParsedError

    return stop


@pytest.mark.parametrize("name", ["release.yml", "test.yml"])
def test_every_tool_of_a_workflow_takes_the_arguments_it_is_given(repository, monkeypatch, name):
    """Nothing is done: the parser of arguments is the last that runs."""
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed(argparse.ArgumentParser.parse_args))
    commands = re.findall(r"python -m (tools[\w.]+)(.*)", workflows(repository)[name].read_text())
    assert commands
    for module, arguments in commands:
        monkeypatch.setattr("sys.argv", [module, *shlex.split(arguments)])
        with pytest.raises(ParsedError):
            importlib.import_module(module).main()


def test_the_program_that_asks_about_a_tag_needs_the_standard_library_alone(repository):
    """It runs before anything is installed."""
    command = [sys.executable, "-S", "-m", "tools.release.tag", "99.0"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert not done.stderr and "CHANGELOG.md has no section [99.0]" in done.stdout
