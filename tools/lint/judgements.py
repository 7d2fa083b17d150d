"""Judges a compiled launch: problems, which make it wrong, and drawbacks, which make it slow, with limits and reasons.

No launch may have a problem. A drawback costs time. Drawbacks are judged only for symmetric products of aligned 16-bit
operands on sm_90, whose main loop has been studied; the limits below hold for that loop. A configuration
with a drawback may still be the fastest on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Optional

from tools.lint.binary import Facts
from tools.lint.cases import AnyCase
from tools.lint.waves import blocks_by_registers, blocks_per_sm


class Limits(NamedTuple):
    """Limits of one GPU: bytes of shared memory of a block and of a multiprocessor, and its 16-bit matrix instructions.

    `tensor_flops` is how many FLOPs a multiprocessor's tensor cores do per clock in dense 16-bit products summed in
    float32. None: GPUs of this target differ.
    """

    shared: int
    shared_of_sm: int
    matrix: str
    tensor_flops: Optional[int]


LIMITS = {
    "sm_80": Limits(163 << 10, 164 << 10, "HMMA", 2048),
    "sm_90": Limits(227 << 10, 228 << 10, "HGMMA", 4096),
    "sm_100": Limits(227 << 10, 228 << 10, "UTCHMMA", 8192),
    "sm_120": Limits(99 << 10, 100 << 10, "HMMA", None),
    "gfx942": Limits(64 << 10, 64 << 10, "v_mfma_f32_", None),
}
ANY_MATRIX = "HMMA|HGMMA|UTC.?.?MMA|v_mfma_"
AMD_EXACT = r"v_mfma_f32_\w+_f32$"
SPILLS = "LDL|STL|scratch_load|scratch_store"
STORES = "STG|UTMASTG|global_store|buffer_store"

# One group of products runs while the next operands are loaded. At 0 the tensor cores would wait for every load.
IN_FLIGHT = 1
# If each thread writes 16 bytes, a warp's store fills whole lines of memory with the fewest instructions.
STORE_BITS = 128
# All warps wait at a barrier of the block, however little was multiplied since the last one. Triton's pipelines have 3
# to 5 barriers in a step of 64. Steps of 32 have as many, and their rows fill only half of the 128 bytes that a
# descriptor swizzles.
DEPTH_OF_BARRIER = 12
# Only the loop of another block on the multiprocessor hides the loads before a block's loop and the stores after it.
BLOCKS = 2
# Each of a multiprocessor's 4 schedulers issues one instruction per clock. Above 1 the tensor cores wait for them.
ISSUE_SHARE = 1.0
SCHEDULERS = 4
# Published optimizations of H100 kernels show about 7 TB/s from the second-level cache: 990 TFLOP/s would need 141
# FLOPs per byte. Tiles of 64 have 32; below that less than a quarter of the speed is possible.
FLOPS_PER_BYTE = 32


def problems(case: AnyCase, facts: Facts, descriptors: bool) -> Iterator[str]:
    """Yield why a compiled case must not be shipped. `descriptors`: its operands come through tensor descriptors."""
    limits = LIMITS[case.gpu]
    if facts.shared > limits.shared:
        yield f"needs {facts.shared} bytes of shared memory, a block has {limits.shared}"
    if not case.competes:
        yield from spills(facts)
    if not case.gpu.startswith("gfx") and not blocks_by_registers(facts.registers, case.config[3]):
        yield f"cannot start: {case.config[3]} warps of {facts.registers} registers fit into no multiprocessor"
    if not facts.count(STORES):
        yield "stores nothing: the compiler gave up and left a stub"
    # The instructions of whole warp groups multiply 64 rows or more, and the smallest matrices have fewer.
    matrix = ANY_MATRIX if case.kernel == "small_polar" and case.parts[0] < 64 else limits.matrix
    if case.dtype != "float32" and not facts.count(matrix):
        yield f"has no matrix instruction {matrix}"
    if case.dtype == "float32" and (facts.count(ANY_MATRIX) != facts.count(AMD_EXACT)):
        yield "multiplies float32 by matrix instructions that round it"
    if descriptors and facts.count("UTMALDG") < 2:
        yield f"loads two operands by {facts.count('UTMALDG')} descriptor loads"
    if facts.specialized:
        yield "gives warps different work, which no configuration asks for"
    if not case.products[0] <= products(case, facts) <= case.products[1]:
        yield f"multiplies {products(case, facts) / case.products[0]:g} times what a tile needs"


def spills(facts: Facts) -> Iterator[str]:
    """Yield how much a compiled case spills: a problem where it is chosen, and a drawback where it competes."""
    if facts.spilled or facts.count(SPILLS):
        yield f"spills {facts.spilled} bytes of registers by {facts.count(SPILLS)} instructions"


def drawbacks(case: AnyCase, facts: Facts) -> Iterator[str]:
    """Yield what makes a case slow: one for sm_90 whose aligned operands come through tensor descriptors."""
    loop, depth = facts.loop, case.parts[2]
    if loop is None:
        yield "has no loop of matrix instructions"
        return
    if loop.in_flight is None or loop.in_flight < IN_FLIGHT:
        yield f"has {loop.in_flight or 0} products in flight while it loads, at least {IN_FLIGHT} hides that"
    if loop.from_registers:
        yield f"takes operands of {loop.from_registers} products from registers, where shared memory would do"
    if loop.shared_accesses:
        yield f"accesses shared memory by {loop.shared_accesses} loads and stores in its loop, where descriptors do it"
    if loop.barriers * DEPTH_OF_BARRIER > depth:
        yield f"has {loop.barriers} barriers in a step of {depth} along k, at most one for {DEPTH_OF_BARRIER} is cheap"
    if facts.store_bits is not None and facts.store_bits < STORE_BITS:
        yield f"stores {facts.store_bits} bits at a time, {STORE_BITS} fill lines of memory"
    if blocks(case, facts) < BLOCKS:
        yield f"has {blocks(case, facts)} block on a multiprocessor, {BLOCKS} hide each other's first loads and stores"
    if issue_share(case, facts) > ISSUE_SHARE:
        yield f"issues instructions for {issue_share(case, facts):.2f} of the tensor cores' time"
    if flops_per_byte(case) < FLOPS_PER_BYTE:
        yield f"does {flops_per_byte(case):g} FLOPs for a byte of its tile, the cache feeds {FLOPS_PER_BYTE}"


def products(case: AnyCase, facts: Facts) -> float:
    """Return how many products of tiles the loops contain."""
    return facts.work / math.prod(case.parts)


def blocks(case: AnyCase, facts: Facts) -> int:
    """Return how many blocks of an NVIDIA kernel run on one multiprocessor at once."""
    return blocks_per_sm(facts.shared, facts.registers, case.config[3], LIMITS[case.gpu].shared_of_sm)


def issue_share(case: AnyCase, facts: Facts) -> Optional[float]:
    """Return the clocks for issuing one pass of the main loop divided by the clocks of its products; None if unknown.

    Above 1 the tensor cores cannot reach their rate. Below 1 they may still not reach it.
    """
    rate = LIMITS[case.gpu].tensor_flops
    if facts.loop is None or rate is None:
        return None
    issued = facts.loop.instructions * case.config[3] / SCHEDULERS
    return issued / (2 * math.prod(case.parts) / rate)


def flops_per_byte(case: AnyCase) -> float:
    """Return the FLOPs of a tile for each byte of its operands that it loads."""
    rows, cols, depth = case.parts
    return 2 * rows * cols * depth / ((rows + cols) * depth * (4 if case.dtype == "float32" else 2))
