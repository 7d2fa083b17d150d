"""The main loop of NVIDIA's machine code, and how wide the code stores.

Every backward branch closes a loop. The main loop is the shortest one with a matrix instruction: what a
program repeats for each part of its sums.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Optional

MATRIX = r"[HI]G?MMA|UTC.?.?MMA"
# Stores from registers to global memory; stores by descriptors are never narrow.
STORE = r"STG\.E"
SHARED = r"(LDS|STS)(\.|$)"
GROUP_WAIT = r"WARPGROUP\.DEPBAR\.LE gsb\d+, 0x([0-9a-f]+)"


class Instruction(NamedTuple):
    """One instruction without its predicate: its address, its name with modifiers, its operands."""

    address: int
    opcode: str
    operands: str


class Loop(NamedTuple):
    """The main loop of a kernel; `opcodes` says how often each instruction with modifiers occurs in one pass.

    `in_flight` is how many groups of warp-group products may still be running where the loop waits for some of them.
    `from_registers` is how many of these products have an operand in registers. Both exist on Hopper only; for other
    code they are None and 0.
    """

    instructions: int
    opcodes: dict[str, int]
    in_flight: Optional[int] = None
    from_registers: int = 0

    def count(self, pattern: str) -> int:
        """Return how many of `opcodes` match `pattern` at their beginning."""
        return sum(number for opcode, number in self.opcodes.items() if re.match(pattern, opcode))

    @property
    def barriers(self) -> int:
        """How often all warps of a block wait for each other."""
        return self.count(r"BAR\.")

    @property
    def shared_accesses(self) -> int:
        """How often a warp loads or stores single words of shared memory. LDSM (matrix loads) does not count."""
        return self.count(SHARED)


def read_instructions(sass: str) -> list[Instruction]:
    """Return the instructions of a kernel from the text that cuobjdump prints."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", sass)
    return [Instruction(int(address, 16), opcode, operands.strip()) for address, opcode, operands in lines]


def counted(instructions: Sequence[Instruction]) -> dict[str, int]:
    """Return how often each instruction occurs."""
    return dict(Counter(instruction.opcode for instruction in instructions))


def main_loop(instructions: Sequence[Instruction]) -> Optional[Loop]:
    """Return the shortest loop with a matrix instruction; None if there is none."""
    places = {instruction.address: place for place, instruction in enumerate(instructions)}
    bodies = []
    for place, (_, opcode, operands) in enumerate(instructions):
        target = re.search(r"0x([0-9a-f]+)$", operands) if re.match(r"BRA(\.|$)", opcode) else None
        first = places.get(int(target[1], 16)) if target else None
        if first is not None and first <= place:
            bodies.append(instructions[first : place + 1])
    bodies = [body for body in bodies if any(re.match(MATRIX, instruction.opcode) for instruction in body)]
    return _described(min(bodies, key=len)) if bodies else None


def _described(body: Sequence[Instruction]) -> Loop:
    waits = [re.match(GROUP_WAIT, f"{opcode} {operands}") for _, opcode, operands in body]
    in_flight = min((int(wait[1], 16) for wait in waits if wait), default=None)
    # The result stands first; a descriptor of shared memory is `gdesc[...]`, an operand in registers is not.
    groups = [operands.split(", ")[1:-1] for _, opcode, operands in body if opcode.startswith("HGMMA")]
    from_registers = sum(bool(operands) and not operands[0].startswith("gdesc") for operands in groups)
    return Loop(len(body), counted(body), in_flight, from_registers)


def narrowest_store(opcodes: dict[str, int]) -> Optional[int]:
    """Return the width in bits of a thread's narrowest store to global memory; None if there are no stores."""
    widths = [_bits(opcode) for opcode in opcodes if re.match(STORE, opcode)]
    return min(widths, default=None)


def _bits(opcode: str) -> int:
    width = re.search(r"\.[US]?(8|16|64|128)(?=\.|$)", opcode)
    return int(width[1]) if width else 32
