"""Check in the machine code of a variant that the compiled product for Hopper works as intended.

    python -m tools.lint.hopper LIBRARY

tests/hopper_model shows that the code is right, as far as that is possible without a GPU. Nothing here shows that it is
fast.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from rich.console import Console
from rich.table import Table

from tools.build.commands import BuildError, run
from tools.lint.binary import CUOBJDUMP
from tools.lint.judgements import ISSUE_SHARE, LIMITS, SCHEDULERS, SPILLS
from tools.lint.machine_code import Instruction, Loop, counted, main_loop, read_instructions

ARCH = "sm_90a"
KERNEL = "symmetric_kernel"
# A warp group multiplies the 64 rows of its part by all columns of the tile, 64 of k in a step.
PRODUCT, PRODUCTS = r"HGMMA\.64x256x16\.F32", 4
WARPS = 8
STEP_FLOPS = 2 * 128 * 256 * 64
# Registers per thread at the start: 65,536 for three warp groups, in multiples of 8. Warps then hand some to others.
REGISTERS = 168
# A piece of a part is stored as it is and once more mirrored, or it is on the diagonal: three stores for four pieces.
STORES = 12
# A thread keeps and reads its 128 sums of a section by fours.
KEPT, KEEPS, READS = 32, r"STG\.E\.128$", r"LDG\.E\.128$"
# Between the two a warp group arrives: fences before and after the count make sums visible and forget older ones.
FENCE = "MEMBAR.SC.GPU", "CCTL.IVALL"
ARRIVAL = "BAR.SYNC", *FENCE, "ATOMG.E.ADD.STRONG.GPU", *FENCE, "BAR.SYNC"


class Code(NamedTuple):
    """A compiled kernel; `stack` is bytes per thread, `arrival` what orders its accesses to the sums of sections."""

    name: str
    registers: int
    stack: int
    opcodes: dict[str, int]
    loop: Optional[Loop]
    arrival: tuple[str, ...]

    count = Loop.count

    @property
    def issue_share(self) -> float:
        """The clocks for issuing one step of the main loop, divided by the clocks of its products."""
        issued = (self.loop.instructions if self.loop else 0) * WARPS / SCHEDULERS
        return issued / (STEP_FLOPS / LIMITS["sm_90"].tensor_flops)


def read_kernels(library: Path) -> list[Code]:
    """Return the kernels for Hopper in a library, in their order there."""
    used = run([CUOBJDUMP, "-arch", ARCH, "-res-usage", library])
    resources = {
        name: (int(registers), int(stack))
        for name, registers, stack in re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", used)
    }
    kernels = []
    for text in re.split(r"^\s*Function : ", run([CUOBJDUMP, "-arch", ARCH, "-sass", library]), flags=re.MULTILINE)[1:]:
        name = text.split()[0]
        if KERNEL in name:
            code = read_instructions(text)
            kernels.append(Code(name, *resources[name], counted(code), main_loop(code), arrival(code)))
    return kernels


def arrival(code: Sequence[Instruction]) -> tuple[str, ...]:
    """Return the barriers, fences and counts between the last sum that is kept and the first that is read."""
    opcodes = [instruction.opcode for instruction in code]
    kept = max((i for i, opcode in enumerate(opcodes) if re.match(KEEPS, opcode)), default=0)
    read = min((i for i, opcode in enumerate(opcodes) if i > kept and re.match(READS, opcode)), default=kept)
    matches = (re.match("|".join(map(re.escape, ARRIVAL)), opcode) for opcode in opcodes[kept:read])
    return tuple(match[0] for match in matches if match)


def problems(code: Code) -> Iterator[str]:
    """Yield each way in which a kernel differs from what is intended."""
    if code.registers != REGISTERS or code.stack or code.count(SPILLS):
        yield f"takes {code.registers} registers and {code.stack} bytes of stack, not {REGISTERS} and none"
    if not (code.count(r"USETMAXREG\.DEALLOC") and code.count(r"USETMAXREG\.TRY_ALLOC")):
        yield "does not hand registers from the warps that load to those that multiply"
    if code.count("HGMMA") != code.count(PRODUCT) or not code.count(PRODUCT):
        yield f"multiplies by other instructions than {PRODUCT}"
    shared = code.count(r"UTMALDG.*\.MULTICAST")
    if not 0 < shared < code.count("UTMALDG"):
        yield f"has {code.count('UTMALDG')} tensor loads, {shared} of them for both blocks: A is a block's, B both's"
    if code.count("UTMASTG") != STORES:
        yield f"has {code.count('UTMASTG')} tensor stores, not {STORES}"
    keeps, stores, reads = map(code.count, (KEEPS, "STG", READS))
    if not keeps == stores == reads == KEPT:
        yield f"keeps sums by {keeps} of {stores} stores and {reads} loads, not {KEPT}"
    if code.arrival != ARRIVAL:
        yield f"orders the sums of sections by {' '.join(code.arrival) or 'nothing'}, not {' '.join(ARRIVAL)}"
    yield from _problems_of(code.loop)
    if code.issue_share > ISSUE_SHARE:
        yield f"issues instructions for {code.issue_share:.2f} of the tensor cores' time"


def _problems_of(loop: Optional[Loop]) -> Iterator[str]:
    if loop is None:
        yield "has no loop of matrix instructions"
        return
    if loop.count(PRODUCT) != PRODUCTS:
        yield f"has {loop.count(PRODUCT)} products in a step, not {PRODUCTS}"
    if loop.in_flight != 1:
        yield f"has {loop.in_flight} products in flight where it waits, not 1"
    if loop.from_registers or loop.shared_accesses or loop.barriers:
        yield "moves operands through registers, or lets warp groups wait for one another, in its main loop"


def table(kernels: list[Code]) -> Table:
    """Return a table with a line for each kernel: what it needs and what its loop has."""
    result = Table("kernel", "registers", "stack", "HGMMA", "UTMALDG", "UTMASTG", "issue", "verdict")
    for i, code in enumerate(kernels):
        counts = (code.registers, code.stack, *(code.count(name) for name in ("HGMMA", "UTMALDG", "UTMASTG")))
        verdict = "; ".join(problems(code)) or "passes"
        result.add_row(str(i), *map(str, counts), f"{code.issue_share:.2f}", verdict)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the machine code of the compiled product for Hopper.")
    parser.add_argument("library", type=Path)
    library = parser.parse_args().library
    try:
        kernels = read_kernels(library)
    except BuildError as error:
        print(f"tools.lint.hopper: {error}", file=sys.stderr)
        return 1
    if not kernels:
        print(f"tools.lint.hopper: {library} has no {KERNEL} for {ARCH}", file=sys.stderr)
        return 1
    Console().print(table(kernels))
    return int(any(any(problems(code)) for code in kernels))


if __name__ == "__main__":
    sys.exit(main())
