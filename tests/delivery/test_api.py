"""The public surface changes only together with the changelog, and from version 1 on with the version."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.built_kernel import load_variant
from tools.release import api
from tools.release.changelog import UNRELEASED, named, sections
from tools.release.surface import surface

BASE = {"tune": "function", "tune(shapes)": "argument 0", "tune(budget)": "keyword-only = 60.0", "STATE_FORMAT": "2"}
RELEASED = api.Snapshot("1.0", 1, [], {}, {}, BASE)
LOG = "# Changelog\n\n## [Unreleased]\n\n{}\n## [1.0] - 2027-01-01\n\n### Added\n\n- `tune`\n"
# What a surface becomes, the part of the changelog that needs it, and whether code for the release may fail then.
CHANGES = {
    "a name": ({"route": "function"}, "Added", False),
    "an argument with a default": ({"tune(device)": "keyword-only = None"}, "Added", False),
    "an argument that calls must give": ({"tune(dtype)": "argument 1"}, "Added", True),
    "any arguments": ({"tune(settings)": "variadic keyword"}, "Added", False),
    "another default": ({"tune(budget)": "keyword-only = 30.0"}, "Changed", True),
    "another format": ({"STATE_FORMAT": "3"}, "Changed", True),
    "no such argument": ({"tune(budget)": None}, "Removed", True),
}


def changed(change):
    return {name: line for name, line in {**BASE, **change}.items() if line is not None}


def test_the_snapshot_is_the_surface_of_the_code(kernel, repository):
    lines = api.differences(api.read(repository), surface(kernel))
    assert not lines, "\n".join(lines)


def test_the_changelog_names_what_has_changed_since_the_last_release(repository):
    lines = api.untold(api.read(repository), (repository / "CHANGELOG.md").read_text(), api.read_version(repository))
    assert not lines, "\n".join(lines)


def test_the_snapshot_is_as_its_tool_writes_it(repository):
    snapshot = api.read(repository)
    assert (repository / api.SNAPSHOT).read_text() == api.written(snapshot)
    assert snapshot.follow(snapshot.surface) == snapshot


def test_the_surface_has_every_public_name_and_argument(kernel):
    names = surface(kernel)
    assert set(kernel.__all__) <= names.keys()
    expected = ("Muon.step", "Muon(lr)", "compat.Muon(ns_steps)", "MuonFactory.__call__(args)", "ops.descend_")
    assert {*expected, 'group["lr_factor"]', 'state["second_moment"]'} <= names.keys()
    assert not [name for name in names if "0x" in names[name]]  # an address would differ from run to run


def test_a_second_copy_in_the_process_has_the_same_surface(kernel, tmp_path):
    """It shares the library of the first."""
    built = Path(kernel.__file__).parent
    assert surface(load_variant(shutil.copytree(built, tmp_path / built.name))) == surface(kernel)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_surface_is_found_and_told(change):
    change, part, _ = CHANGES[change]
    (name,) = change
    (line, advice) = api.differences(RELEASED, changed(change))
    assert line.startswith(f"{part.lower()}: {name}: ") and "python -m tools.release.api" in advice
    later = RELEASED.follow(changed(change))
    assert api.differences(later, changed(change)) == []
    told = LOG.format(f"### {part}\n\n- `{name}`, at last.\n")
    assert api.untold(later, told, 2) == []
    for elsewhere in (LOG.format(""), LOG.format(f"### Fixed\n\n- `{name}`\n"), told.replace("`", "")):
        assert api.untold(later, elsewhere, 2) == [
            f"{name} was {part.lower()}: name it, as `{name}`, in CHANGELOG.md under Unreleased, {part}"
        ]


def test_what_belongs_to_a_new_name_needs_no_entry_of_its_own():
    change = {"route": "class", "route(params)": "argument 0", "route.rows": "property", "route.rows(x)": "argument 1"}
    later = RELEASED.follow(changed(change))
    assert api.untold(later, LOG.format("### Added\n\n- `route`\n"), 1) == []
    assert len(api.untold(later, LOG.format("### Added\n\n- `rout`\n"), 1)) == 1
    assert api.outermost(["tune(shapes)", "tuned", "tune"]) == ["tuned", "tune"]


@pytest.mark.parametrize("change", CHANGES)
def test_from_version_1_on_a_change_that_breaks_code_needs_a_new_version(change):
    change, part, breaks = CHANGES[change]
    (name,) = change
    later = RELEASED.follow(changed(change))
    told = LOG.format(f"### {part}\n\n- `{name}`\n")
    lines = api.untold(later, told, 1)
    assert len(lines) == breaks and all("set version = 2 in build.toml" in line and name in line for line in lines)
    assert api.untold(api.Snapshot(**{**vars(later), "version": 0}), told, 0) == []


def test_what_comes_and_goes_between_releases_is_no_change():
    there = RELEASED.follow(changed({"route": "function", "tune(budget)": None}))
    assert there.follow(BASE) == RELEASED


def test_a_release_begins_to_count_anew():
    later = RELEASED.follow(changed({"route": "function"}))
    log = LOG.format("## [1.1] - 2027-02-01\n\n### Added\n\n- `route`\n")
    assert api.release(later, log, 1) == api.Snapshot("1.1", 1, [], {}, {}, changed({"route": "function"}))
    for refused in (
        LOG.format(""),
        LOG.format("### Added\n\n- `route`\n"),
        log.replace("## [1.1]", "### Added\n\n## [1.1]"),
        log.replace("## [1.1]", "- `tune`\n\n## [1.1]"),
    ):
        with pytest.raises(ValueError, match="needs a section of this release"):
            api.release(later, refused, 1)
    with pytest.raises(ValueError, match=r"route was added: name it.* under 1\.1, Added"):
        api.release(later, log.replace("`route`", "`tune`"), 1)


def test_a_snapshot_survives_its_file(tmp_path):
    (tmp_path / api.SNAPSHOT).parent.mkdir(parents=True)
    snapshot = RELEASED.follow(changed({"tune(budget)": None, "STATE_FORMAT": "3"}))
    (tmp_path / api.SNAPSHOT).write_text(api.written(snapshot))
    assert api.read(tmp_path) == snapshot and json.loads(api.written(snapshot))["removed"]


def test_a_changelog_is_read_by_release_and_part():
    assert list(sections(LOG.format("### Fixed\n\n- x\n"))) == [UNRELEASED, "1.0"]
    assert named(sections(LOG.format(""))["1.0"]["Added"]) == {"tune"}
    with pytest.raises(ValueError, match="must begin with"):
        sections("## 1.0\n")
