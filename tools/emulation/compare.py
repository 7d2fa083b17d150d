"""Run built variants on emulated processors, keep the results, and write docs/processors.md of them.

    python -m tools.build.variants --backend cpu
    python -m tools.build.variants --machine aarch64
    python -m tools.emulation.compare build

Status 1 if bits differ that have to be equal, or if a processor is missing; `tools.emulation.debian` makes aarch64's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.built_kernel import read_metadata
from tools.build.commands import BuildError, run
from tools.emulation.processors import ARM, X86, emulated, here, version
from tools.pages.markdown import commit_words, table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/processors.md"
RESULTS = ROOT / "benchmarks/results/processors.json"
TEXT = """\
# Processors

The libraries choose their instructions when they are loaded. This page shows that the processor changes no bit of any
operation except `gemm_` and the iterations, which sum in another order for other instructions. "Here" is the machine
that ran `python -m tools.emulation.compare build`, which made the page. The other processors were emulated by
{emulator}, which knows neither AVX-512 nor AMX. The variants are of
{made_of}.

{processors}

`make build-aarch64` built the variant for aarch64 with Debian's cross compiler and PyPI's torch. Debian's Python and
torch ran it, which `make aarch64` unpacks.

{compilers}

The losses were measured before the first and after the last of {steps} steps of `Muon` in float32. They agree in
the digits shown, but need not agree in all: the products are torch's, or `gemm_`'s with the processor's instructions.

## Bits

Each operation ran over all its dtypes, with subnormal and infinite numbers, zeros and NaN among the inputs; those of
`gemm_` and of the norms are ordinary numbers. An entry is the start of a hash of all results. A row of `gemm_` has
entries where the processor has its instructions. Column gemm above names those that each processor prefers, for
bfloat16 and for float32. In float32 aarch64 has AVX2's bits: both round a product and the sum it goes into once. The
portable instructions of x86-64 round twice.

{bits}
"""


def page(results: dict) -> str:
    """Return the page for the emulator and the fingerprints in `results`, by the name of the processor."""
    fingerprints = results["processors"]
    rows = [
        [
            name,
            fingerprint["variant"],
            f"{fingerprint['torch']}, {fingerprint['level']}",
            fingerprint["python"],
            fingerprint["instructions"],
            f"{fingerprint['losses'][0]:.2f}, {fingerprint['losses'][-1]:.2f}",
        ]
        for name, fingerprint in fingerprints.items()
    ]
    names = dict.fromkeys(name for fingerprint in fingerprints.values() for name in fingerprint["bits"])
    bits = [
        [operation, *(fingerprint["bits"].get(operation, "") for fingerprint in fingerprints.values())]
        for operation in names
    ]
    return TEXT.format(
        emulator=results["emulator"],
        made_of=commit_words(results["commit"], results["dirty"]),
        compilers=table(["variant", "compiler"], list(results["compilers"].items())),
        steps=len(fingerprints["here"]["losses"]) - 1,
        processors=table(["processor", "variant", "torch", "Python", "gemm", "losses"], rows),
        bits=table(["operation", *fingerprints], bits),
    )


def differences(one: dict, other: dict) -> set[str]:
    """Return the operations whose bits differ between two fingerprints, of those that both processors ran."""
    return {name for name, bits in one["bits"].items() if bits != other["bits"].get(name, bits)}


def sources(variants: Iterable[Path]) -> dict:
    """Return the `commit` that variants are of, and whether files were `dirty`; `BuildError` if they are of several."""
    origins = [read_metadata(variant)["provenance"]["kernel"] for variant in variants]
    if any(each != origins[0] for each in origins):
        raise BuildError(f"the variants are of different sources: {', '.join(map(str, origins))}")
    return {"commit": origins[0]["commit"], "dirty": origins[0]["dirty"]}


def compiler(variant: Path) -> str:
    """Return the compiler of a variant's library, as it has written it there; `BuildError` if it has no library."""
    libraries = list(variant.glob("*.so"))
    if len(libraries) != 1:
        raise BuildError(f"need a compiled variant, and {variant} has {len(libraries)} libraries")
    written = run(["readelf", "--string-dump=.comment", *libraries])
    return ", ".join(re.findall(r"\]\s+(.+)", written))


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare what variants compute on emulated processors.")
    parser.add_argument("build", type=Path, help="a folder with variants of one commit for x86-64 and aarch64")
    build = parser.parse_args().build
    try:
        processors = [here(), *map(emulated, (*X86, ARM))]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            prints = list(pool.map(lambda processor: processor.fingerprint(build), processors))
        fingerprints = {processor.name: fingerprint for processor, fingerprint in zip(processors, prints)}
        compilers = {fingerprint["variant"]: compiler(build / fingerprint["variant"]) for fingerprint in prints}
        made_of = sources(build / name for name in compilers)
        results = {"emulator": version(), **made_of, "compilers": compilers, "processors": fingerprints}
    except BuildError as error:
        print(f"tools.emulation.compare: {error}", file=sys.stderr)
        return 1
    differing = [name for name, fingerprint in fingerprints.items() if differences(fingerprint, fingerprints["here"])]
    if differing:
        print(f"tools.emulation.compare: nothing is written, bits differ on {', '.join(differing)}", file=sys.stderr)
        return 1
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(results))
    print(f"written: {RESULTS}, {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
