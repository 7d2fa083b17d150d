"""What a compiled kernel needs from a GPU and how it works, read from Triton's IR and from the machine code."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, Optional

import triton

from tools.build.commands import run
from tools.lint.machine_code import Loop, counted, main_loop, narrowest_store, read_instructions

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Facts(NamedTuple):
    """What a compiled kernel needs: `shared` is bytes of shared memory per block, `spilled` bytes per thread.

    The last two fields are read from NVIDIA's machine code only.
    """

    shared: int
    registers: int
    spilled: int
    opcodes: dict[str, int]  # how often each instruction, with all its modifiers, occurs in the code
    work: int  # multiply-adds of one pass of the loop over k, of all warps together
    specialized: bool  # whether warps run different parts of the program
    loop: Optional[Loop] = None  # the main loop; None without matrix instructions in a loop
    store_bits: Optional[int] = None  # width of a thread's narrowest store to global memory

    count = Loop.count


def read_facts(compiled: Any) -> Facts:
    """Return the facts of a kernel that Triton compiled for NVIDIA (its cubin) or AMD (its assembly)."""
    ir, shared = compiled.asm["ttgir"], compiled.metadata.shared
    about_ir = {"work": loop_work(ir), "specialized": "ttg.warp_specialize" in ir}
    if "cubin" not in compiled.asm:
        return Facts(shared, *_amd(compiled.asm), **about_ir)
    registers, stack, sass = _disassembled(compiled.asm["cubin"])
    code = read_instructions(sass)
    opcodes = counted(code)
    return Facts(
        shared, registers, stack, opcodes, **about_ir, loop=main_loop(code), store_bits=narrowest_store(opcodes)
    )


def loop_work(ir: str) -> int:
    """Return the multiply-adds of all matrix products inside loops of TTGIR text, each loop's body counted once.

    Products that pipelining has moved out of the loop are not counted, and warps that share a product show smaller
    ones.
    """
    depth, loops, work = 0, [], 0
    for line in ir.splitlines():
        if re.search(r"\bscf\.(for|while)\b", line):
            loops.append(depth)
        depth += line.count("{") - line.count("}")
        while loops and depth <= loops[-1]:
            loops.pop()
        if loops and re.search(r"\b(tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma)\s", line):
            (rows, inner), (_, cols) = re.findall(r"(?:tensor|memdesc)<(\d+)x(\d+)x[a-z]", line)[:2]
            work += int(rows) * int(inner) * int(cols)
    return work


def _disassembled(cubin: bytes) -> tuple[int, int, str]:
    """Return registers, bytes of stack and the instructions of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = run([CUOBJDUMP, "-res-usage", "-sass", file.name])
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", text).groups())
    return registers, stack, text


def _amd(asm: dict[str, Any]) -> tuple[int, int, dict[str, int]]:
    text = asm["amdgcn"]
    # The compiler's own count of vector registers includes those for the matrix unit. Scalars without a register go
    # into lanes of a vector register; if there is none left, they show in ScratchSize.
    names = r"\.vgpr_count", "ScratchSize", r"\.vgpr_spill_count"
    registers, *spilled = (int(re.search(name + r":\s+(\d+)", text)[1]) for name in names)
    return registers, sum(spilled), dict(Counter(re.findall(r"^\s+([a-z]+_\w+)", text, re.MULTILINE)))
