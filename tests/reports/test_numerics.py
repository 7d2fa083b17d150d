"""docs/numerics.md is what the tool makes of its results file, and what it says in words is true of that file."""

import json
import re

import pytest

from tools.numerics import report
from tools.numerics.document import filled, named
from tools.numerics.figures import draw_all
from tools.numerics.measurements import measure

LINK = re.compile(r"\(\.\./(benchmarks/results/numerics-[^)]+\.json)\)")


@pytest.fixture(scope="module")
def page(repository):
    return (repository / "docs/numerics.md").read_text()


@pytest.fixture(scope="module")
def file(page):
    (file,) = set(LINK.findall(page))
    return file


@pytest.fixture(scope="module")
def results(repository, file):
    return json.loads((repository / file).read_text())


@pytest.fixture(scope="module")
def tiny(kernel):
    """A measurement of matrices so small that it takes no time, as its file would give it back."""
    facts = dict(device="a processor", torch="2", commit="0" * 40, dirty=False)
    return json.loads(json.dumps({**facts, **measure(kernel, size=(12, 20), sides=(8, 16))}))


def error(results, spectrum, dtype, method):
    errors = [row["error"] for row in results["errors"] if row["schedule"] == "polar_express"
              and (row["spectrum"], row["dtype"], row["method"]) == (spectrum, dtype, method)]  # fmt: skip
    return errors[0]


def test_page_tables_match_the_results_file(page, results, file):
    assert filled(page, results, f"../{file}") == page


def test_every_figure_of_the_page_exists(repository, page):
    figures = re.findall(r"!\[[^]]+\]\((figures/[^)]+)\)", page)
    assert len(figures) == 4
    for figure in figures:
        assert (repository / "docs" / figure).stat().st_size < 200_000


def test_page_without_its_markers_is_refused(page, results):
    with pytest.raises(ValueError, match="got none"):
        filled("# Numerics\n", results, "")
    with pytest.raises(ValueError, match="once each"):
        filled(page.replace("numerics: bands", "numerics: band"), results, "")


def test_measurement_fills_page_and_figures(page, tiny, tmp_path):
    assert filled(page, tiny, "file.json").count("\n| ") > 30
    drawn = draw_all(tiny, tmp_path)
    assert sorted(drawn) == sorted(file.name for file in tmp_path.iterdir())


@pytest.mark.parametrize("content", [None, "no JSON", "{}", "[]"])
def test_a_file_without_results_is_refused_in_one_line(content, tmp_path, monkeypatch, capsys):
    """So is one outside the repository, to which the page could not link."""
    file = tmp_path / "results.json"
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr(report, "ROOT", tmp_path if content != "{}" else tmp_path / "elsewhere")
    monkeypatch.setattr("sys.argv", ["report", "--from", str(file)])
    with pytest.raises(SystemExit):
        report.main()
    assert f"error: {file} has no results for numerics.md: " in capsys.readouterr().err


def test_results_have_the_coefficients_of_the_presets(kernel, results):
    """Else they are results of other schedules."""
    for name, preset in kernel.schedules.PRESETS.items():
        steps = kernel.schedules.resolve_schedule(name, 5)
        assert results["schedules"][name] == {"band": list(preset.band), "coefficients": [list(step) for step in steps]}


def test_float16_errs_about_eight_times_less_than_bfloat16(results):
    for spectrum in ("power_law", "log_spaced", "condition_1e6", "clustered", "rank_deficient", "one_huge", "gaussian"):
        ratio = error(results, spectrum, "bfloat16", "standard") / error(results, spectrum, "float16", "standard")
        assert 6 < ratio < 10, spectrum


def test_gram_errors_are_as_the_page_says(results):
    """In float16 and float32, but for equal singular values, where nothing is lost."""
    for spectrum in ("power_law", "log_spaced", "condition_1e6", "clustered", "rank_deficient", "gaussian"):
        half = error(results, spectrum, "float16", "gram") / error(results, spectrum, "float16", "standard")
        single = error(results, spectrum, "float32", "gram") / error(results, spectrum, "float32", "standard")
        assert 1 < half < 4.5 and 3 < single < 1000, spectrum
        assert error(results, spectrum, "float16", "gram") < error(results, spectrum, "bfloat16", "standard"), spectrum


def test_restarts_behave_as_the_page_says(results):
    rows = [row for row in results["restarts"] if row["schedule"] == "polar_express"]
    cases = {(row["dtype"], named(row["restarts"])): row for row in rows}
    for windows in ("gram[5]", "gram[3+2]"):
        assert (cases["bfloat16", windows]["error"] or float("inf")) > 1e3
    assert cases["bfloat16", "gram[2+3]"]["bound"] > 1
    for dtype in ("float16", "bfloat16"):
        largest = error(results, "rank_one", dtype, "standard")
        assert cases[dtype, "standard"]["error"] == pytest.approx(largest, rel=0.05), dtype
    assert cases["float16", "gram[1+2+2]"]["error"] < 1.2 * cases["float16", "standard"]["error"]
    assert cases["float16", "gram[2+3]"]["bound"] < results["limit"] < cases["float16", "gram[3+2]"]["bound"]
    assert cases["float32", "gram[5]"]["bound"] < results["limit"]


def test_scale_keeps_digits_of_large_gram_matrices(results):
    for row in results["scales"]:
        assert row["product_with"] < 2.5e-4, row
        assert row["m"] < 1024 or row["product_without"] > 1.8 * row["product_with"], row
