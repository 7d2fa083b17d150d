"""docs/processors.md is what the tool makes of its results, and what it says in words is true of them."""

from __future__ import annotations

import json

from tools.emulation import compare
from tools.emulation.processors import ARM, X86

RESULTS = json.loads(compare.RESULTS.read_text())


def test_the_page_is_made_of_the_results():
    assert compare.page(RESULTS) == compare.PAGE.read_text()


def test_bits_are_equal_everywhere():
    found = RESULTS["processors"]
    assert set(found) == {"here", *X86, ARM}
    assert all(compare.differences(it, found["here"]) == set() for it in found.values())


def test_every_processor_that_is_emulated_ran_the_variant_for_it():
    found = RESULTS["processors"]
    assert {name: it["variant"].split("-")[-2] for name, it in found.items()} == {
        **dict.fromkeys(("here", *X86), "x86_64"),
        ARM: ARM,
    }
    assert all(found[name]["instructions"] == "portable" for name in (*X86, ARM))
