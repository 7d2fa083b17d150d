"""Measurements that end before all candidates were tried, and the calls that continue them."""

from __future__ import annotations


def test_what_is_left_is_tried_against_the_last_choice(kernel):
    """And not against what is chosen without a measurement. The last choice is not proven again."""
    contest = kernel.tuning.contest
    made = {name: contest.Candidate(None, None, name) for name in ("SINGLE", "NATIVE", "NATIVE_SYMMETRIC")}
    kept = {"m": 64, "k": 64, "products": "NATIVE_SYMMETRIC", "untried": []}
    for untried in ["NATIVE"], ["NATIVE_GRAM"]:
        before = contest.Contest(made, "NATIVE", "SINGLE", None)
        continued = kernel.tuning.findings._continued(before, {**kept, "untried": untried}, "cpu_products")
        assert continued.before == "NATIVE_SYMMETRIC"
        assert set(continued.candidates) == {"SINGLE", "NATIVE_SYMMETRIC", *untried} & set(made)
        continued.candidates["NATIVE_SYMMETRIC"].prove()


def test_times_of_two_calls_are_put_together_and_the_last_one_counts(kernel):
    kept = {"products": "SINGLE", "untried": ["NATIVE"], "seconds": {"SINGLE": 2.0, "NATIVE_SYMMETRIC": 3.0}}
    entry = {"products": "NATIVE", "seconds": {"SINGLE": 1.0, "NATIVE": 0.5}}
    combination = kernel.tuning.findings._with_earlier(entry, kept, dict.fromkeys(entry["seconds"]))
    assert combination == {**entry, "seconds": {"SINGLE": 1.0, "NATIVE": 0.5, "NATIVE_SYMMETRIC": 3.0}}
    # An entry of a GPU has the time of its launch alone.
    kept, entry = {"gain": 1.5, "untried": ["left"], "seconds": 2.0}, {"gain": 2.0, "seconds": 1.0}
    assert kernel.tuning.findings._with_earlier(entry, kept, {"left": None}) == entry


def test_a_call_that_times_nothing_new_leaves_the_earlier_times(kernel):
    """None of those that had no time before: what is left of them is tried by another call."""
    kept = {"products": "NATIVE", "untried": ["NATIVE_GRAM", "NATIVE_SYMMETRIC"], "seconds": {"SINGLE": 2.0}}
    entry = {"products": "SINGLE", "untried": ["NATIVE_GRAM"], "seconds": {"SINGLE": 1.0}}
    combination = kernel.tuning.findings._with_earlier(entry, kept, {"SINGLE": None})
    assert combination == {**kept, "untried": ["NATIVE_GRAM"]}


def test_a_launch_that_lost_to_torch_is_not_raced_again(kernel):
    """A later call tries the candidates that the first had no time for, against torch's products alone."""
    findings, launch = kernel.tuning.findings, {"tile": 128, "tile_k": 64, "group": 8, "warps": 8, "stages": 3}
    made = {name: kernel.tuning.contest.Candidate(None, None, name) for name in ("torch", "128-64-8-8-3-1", "left")}
    contest = kernel.tuning.contest.Contest(made, "128-64-8-8-3-1", "torch", None)
    kept = {"m": 64, "k": 64, **launch, "sections": 1, "untried": ["left"]}
    for gain, kept_one in ((0.9, "torch"), (1.0, "128-64-8-8-3-1"), (1.1, "128-64-8-8-3-1")):
        continued = findings._continued(contest, {**kept, "gain": gain}, "symmetric_gemm")
        assert (continued.before, set(continued.candidates)) == (kept_one, {"torch", "left", kept_one})


def test_a_choice_that_no_longer_competes_gives_way_to_torchs_products(kernel):
    """A method may be unsafe now that torch rounds the factors of float32 products."""
    candidate = kernel.tuning.contest.Candidate
    made = {name: candidate(None, None, name) for name in ("SINGLE", "NATIVE", "NATIVE_SYMMETRIC")}
    contest = kernel.tuning.contest.Contest(made, "NATIVE", "SINGLE", None)
    kept = {"m": 64, "k": 64, "products": "NATIVE_GRAM", "untried": ["NATIVE"]}
    continued = kernel.tuning.findings._continued(contest, kept, "cpu_products")
    assert (continued.before, set(continued.candidates)) == ("SINGLE", {"SINGLE", "NATIVE"})
