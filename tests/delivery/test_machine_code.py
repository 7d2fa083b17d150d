"""What is read from machine code is what stands there: the main loop, and the width of stores."""

from __future__ import annotations

import pytest

from tools.lint import machine_code

# As cuobjdump prints it: a loop that waits and a longer one around it, with predicates, encodings and a final stub.
SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;                  /* 0x00000a0000017a02 */
        /*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;           /* 0x0000000000007b1d */
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR6+0x18000], R4 ;
        /*0030*/              @!P0 BRA 0x20 ;
        /*0040*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0050*/                   LDSM.16.M88.4 R16, [R29+UR6+0x2000] ;
        /*0060*/                   LDS.64 R16, [R29] ;
        /*0070*/                   HGMMA.64x128x16.F32 R24, gdesc[UR20].tnspB, R24 ;
        /*0080*/                   HGMMA.64x128x16.F32 R24, R4, gdesc[UR24], R24, gsb0 ;
        /*0090*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*00a0*/               @P1 BRA 0x40 ;
        /*00b0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00c0*/               @P5 STG.E.128 desc[UR26][R72.64], R52 ;
        /*00d0*/                   BRA 0x10 ;
        /*00e0*/                   BRA 0xe0;
"""


def test_main_loop_is_the_shortest_with_a_product():
    loop = machine_code.main_loop(machine_code.read_instructions(SASS))
    assert loop.instructions == 7 and loop.count("HGMMA") == 2
    assert (loop.in_flight, loop.from_registers, loop.barriers, loop.shared_accesses) == (1, 1, 1, 1)


def test_code_without_a_product_in_a_loop_has_none():
    lines = [line for line in SASS.splitlines() if "HGMMA" not in line]
    assert machine_code.main_loop(machine_code.read_instructions("\n".join(lines))) is None


@pytest.mark.parametrize(
    ("stores", "bits"),
    [
        (["STG.E.128"], 128),
        (["STG.E.128", "STG.E.64"], 64),
        (["STG.E"], 32),
        (["STG.E.128.STRONG.GPU", "STG.E.U16"], 16),
        (["STG.E.U8"], 8),
        (["STS.128", "UTMASTG.2D"], None),
    ],
    ids=str,
)
def test_narrowest_store_is_the_one_reported(stores, bits):
    assert machine_code.narrowest_store(dict.fromkeys(stores, 1)) == bits
