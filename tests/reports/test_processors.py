"""docs/processors.md is what the tool makes of its results, and what it says in words is true of them."""

from __future__ import annotations

import json

import pytest

from tests.support.hub_clients import write_variant
from tools.build.commands import BuildError
from tools.emulation import compare
from tools.emulation.processors import ARM, X86

RESULTS = json.loads(compare.RESULTS.read_text())


def test_the_page_is_made_of_the_results():
    assert compare.page(RESULTS) == compare.PAGE.read_text()


def test_the_page_names_the_commit_of_the_results():
    named = compare.page({**RESULTS, "commit": "0123456789ab" + 28 * "c", "dirty": True})
    assert "nor AMX. The variants are of\ncommit `0123456789ab`, with uncommitted changes.\n\n| processor" in named
    clean = compare.page({**RESULTS, "commit": "c" * 40, "dirty": False})
    assert f"\ncommit `{'c' * 12}`.\n\n| processor" in clean


def test_the_results_of_a_build_have_its_commit(tmp_path):
    """Of one build: variants of several commits would be compared as if they were one."""
    built = [write_variant(tmp_path / name, name, 2, provenance=of("c" * 40)) for name in ("first", "second")]
    assert compare.sources(built) == {"commit": "c" * 40, "dirty": True}
    built.append(write_variant(tmp_path / "third", "third", 2, provenance=of("d" * 40)))
    with pytest.raises(BuildError, match="different sources"):
        compare.sources(built)


def test_a_variant_without_a_library_has_no_compiler(tmp_path):
    with pytest.raises(BuildError, match=r"need a compiled variant, and .*torch-cpu has 0 libraries"):
        compare.compiler(write_variant(tmp_path / "torch-cpu", "torch-cpu", 2))


def of(commit: str) -> dict:
    return {"kernel": {"commit": commit, "dirty": True}}


def test_bits_are_equal_everywhere():
    processors = RESULTS["processors"]
    assert set(processors) == {"here", *X86, ARM}
    assert all(compare.differences(fingerprint, processors["here"]) == set() for fingerprint in processors.values())


def test_every_processor_that_is_emulated_ran_the_variant_for_it():
    processors = RESULTS["processors"]
    assert {name: fingerprint["variant"].split("-")[-2] for name, fingerprint in processors.items()} == {
        **dict.fromkeys(("here", *X86), "x86_64"),
        ARM: ARM,
    }
    assert {name: processors[name]["instructions"] for name in (*X86, ARM)} == {
        **dict.fromkeys((*X86, ARM), "portable, portable"),
        "Haswell": "portable, avx2",
    }


def test_rows_of_products_have_entries_where_the_processor_has_the_instructions():
    """Bits are compared among processors that ran them: a row that nobody else has would prove nothing."""
    ran = {
        name: {name for name in fingerprint["bits"] if "float32" in name}
        for name, fingerprint in RESULTS["processors"].items()
    }

    def rows(instructions: str) -> set[str]:
        operations = "gemm_ in float32", "newton_schulz_ in float32"
        return {
            f"{operation}, {instructions}"
            for operation in (*operations, "gram_newton_schulz_ in bfloat16, float32 squares")
        }

    assert ran["Nehalem"] == ran["SandyBridge"] == rows("portable, x86_64")
    assert ran["Haswell"] == rows("portable, x86_64") | rows("avx2") <= ran["here"]
    assert ran[ARM] == rows("portable, aarch64")


def test_aarch64_has_the_bits_of_avx2_in_float32():
    here, arm = RESULTS["processors"]["here"]["bits"], RESULTS["processors"][ARM]["bits"]
    fused, rounded_twice = here["gemm_ in float32, avx2"], here["gemm_ in float32, portable, x86_64"]
    assert arm["gemm_ in float32, portable, aarch64"] == fused != rounded_twice
