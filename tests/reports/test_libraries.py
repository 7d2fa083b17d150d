"""The page of libraries says what a run of tests/integrations found, and shows the lines that it ran."""

import json
import re

import pytest

from tools.pages import libraries, library_results
from tools.pages.libraries import RESULTS, TESTS

SOURCE = '''"""Some library

How it is used.
"""


def test_loss_falls(optimizer):
    """The loss falls.

    By half.
    """
    # <use>
    opt = optimizer.Muon(model.named_parameters())
    # </use>
    data = batches(20)
    # <use>
    opt.warmup()
    # </use>


def test_each_case_resumes(optimizer):
    """Each case resumes."""
'''
FOUND = {
    "date": "2026-01-01",
    "torch": "2.13.0",
    "python": "3.11",
    "processor": "a processor",
    "seconds": 3,
    "versions": {"some-library": "1.2"},
    "tests": {
        "test_some_library.py::test_loss_falls": {"outcome": "passed", "seconds": 1.0},
        "test_some_library.py::test_each_case_resumes[a]": {"outcome": "passed", "seconds": 1.0},
        "test_some_library.py::test_each_case_resumes[b]": {"outcome": "passed", "seconds": 1.0},
    },
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "test_some_library.py").write_text(SOURCE)
    return tmp_path


def test_page_is_what_the_results_and_the_tests_make(repository):
    assert (repository / "docs/libraries.md").read_text() == libraries.page(TESTS, json.loads(RESULTS.read_text()))


def test_results_are_of_every_test_and_of_the_pinned_versions(repository):
    pins = dict(re.findall(r"^([\w-]+)==(.*)$", (repository / "requirements/integrations.txt").read_text(), re.M))
    results = json.loads(RESULTS.read_text())
    for library in libraries.libraries(TESTS, results):
        assert all(test.outcomes for test in library.tests), library.name
    assert {name: pins[name] for name in results["versions"] if name != "torch"} == {
        name: version for name, version in results["versions"].items() if name != "torch"
    }


def test_page_shows_what_works_and_the_lines_of_use(folder):
    page = libraries.page(folder, FOUND)
    assert "| [Some library](#some-library) | 1.2 | works | [test_some_library.py]" in page
    assert "\nHow it is used.\n\n```python\nopt = optimizer.Muon(model.named_parameters())\nopt.warmup()\n```\n" in page
    assert "- The loss falls.\n- Each case resumes (a, b).\n" in page


@pytest.mark.parametrize("outcome, said", [("failed", "fails"), ("skipped", "not run"), (None, "not run")])
def test_page_says_what_does_not_pass(folder, outcome, said):
    tests = dict(FOUND["tests"])
    del tests["test_some_library.py::test_loss_falls"]
    if outcome is not None:
        tests["test_some_library.py::test_loss_falls"] = {"outcome": outcome, "seconds": 1.0}
    page = libraries.page(folder, {**FOUND, "tests": tests})
    assert "| 1 of 2 tests do not pass |" in page and f"- **{said}**: The loss falls.\n" in page


def test_one_case_that_fails_is_a_test_that_fails(folder):
    tests = {**FOUND["tests"], "test_some_library.py::test_each_case_resumes[b]": {"outcome": "failed", "seconds": 1.0}}
    page = libraries.page(folder, {**FOUND, "tests": tests})
    assert "| 1 of 2 tests do not pass |" in page and "- **fails**: Each case resumes (b).\n" in page


def test_file_without_lines_of_use_is_refused(folder):
    for marker in "# <use>", "# </use>":
        (folder / "test_some_library.py").write_text(SOURCE.replace(marker, "#", 1))
        with pytest.raises(ValueError, match="pairs"):
            libraries.page(folder, FOUND)
    (folder / "test_some_library.py").write_text(re.sub("# </?use>", "#", SOURCE))
    with pytest.raises(ValueError, match="pairs"):
        libraries.page(folder, FOUND)


def test_test_without_a_sentence_is_refused(folder):
    (folder / "test_some_library.py").write_text(SOURCE.replace('"""Each case resumes."""', "pass"))
    with pytest.raises(ValueError, match="test_each_case_resumes needs a docstring"):
        libraries.page(folder, FOUND)


def test_log_makes_results(tmp_path, folder):
    """Of the tests of libraries alone, by the names of their files."""
    log = tmp_path / "log"
    case = {"$report_type": "TestReport", "when": "call", "outcome": "passed", "longrepr": None, "duration": 2.0}
    names = ["tests/integrations/test_some_library.py::test_loss_falls", "tests/muon/test_step.py::test_step"]
    log.write_text("".join(json.dumps({**case, "nodeid": name}) + "\n" for name in names))
    results = library_results.results(log, folder)
    assert results["tests"] == {"test_some_library.py::test_loss_falls": {"outcome": "passed", "seconds": 2.0}}
    assert results["seconds"] == 2 and results["versions"] == {}
    with pytest.raises(ValueError, match="no test of"):
        library_results.results(tmp_path / "missing", folder)


def test_long_lists_of_cases_are_counted():
    assert libraries.in_brackets(["a" * 30, "b" * 30]) == " (2 cases)" and libraries.in_brackets([""]) == ""


def test_lines_of_use_are_as_at_the_top_of_a_file():
    source = "    # <use>\n    class A:\n        x = 1\n\n    y = A()\n\n    z = y\n    # </use>\n"
    assert libraries.lines_of_use(source) == "class A:\n    x = 1\n\n\ny = A()\n\nz = y"
