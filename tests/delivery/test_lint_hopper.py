"""What the machine code of the product for Hopper may lack, told of code that lacks it."""

from __future__ import annotations

import pytest

hopper = pytest.importorskip("tools.lint.hopper", reason="cuobjdump comes with triton")

# What stands in the code of today, as far as it is judged.
OPCODES = {
    "USETMAXREG.DEALLOC.CTAPOOL": 1,
    "USETMAXREG.TRY_ALLOC.CTAPOOL": 1,
    "HGMMA.64x256x16.F32": 8,
    "UTMALDG.3D": 1,
    "UTMALDG.3D.MULTICAST": 1,
    "UTMASTG.3D": 12,
    "STG.E.128": 32,
    "LDG.E.128": 32,
    "LDG.E": 64,
}
LOOP = hopper.Loop(48, {"HGMMA.64x256x16.F32": 4}, in_flight=1)
CODE = hopper.Code("symmetric_kernel", 168, 0, OPCODES, LOOP, hopper.ARRIVAL)


def test_code_as_it_is_meant_to_be_passes():
    assert not list(hopper.problems(CODE))


@pytest.mark.parametrize(
    "change, said",
    [
        ({"registers": 128}, "128 registers"),
        ({"stack": 64}, "64 bytes of stack"),
        ({"opcodes": OPCODES | {"STL.64": 3}}, "bytes of stack"),
        ({"opcodes": OPCODES | {"USETMAXREG.TRY_ALLOC.CTAPOOL": 0}}, "does not hand registers"),
        ({"opcodes": OPCODES | {"HGMMA.64x128x16.F32": 4}}, "other instructions"),
        ({"opcodes": OPCODES | {"UTMALDG.3D.MULTICAST": 0, "UTMALDG.3D": 2}}, "0 of them for both"),
        ({"opcodes": OPCODES | {"UTMASTG.3D": 8}}, "8 tensor stores"),
        ({"opcodes": OPCODES | {"STG.E.128": 4}}, "by 4 of 4 stores and 32 loads"),
        ({"opcodes": OPCODES | {"STG.E": 4}}, "by 32 of 36 stores"),
        ({"opcodes": OPCODES | {"LDG.E.128": 0, "LDG.E": 192}}, "and 0 loads"),
        ({"opcodes": OPCODES | {"LDG.E.128": 0, "LDG.E.128.CONSTANT": 32}}, "and 0 loads"),
        ({"arrival": ()}, "by nothing"),
        ({"arrival": hopper.ARRIVAL[1:]}, "by MEMBAR.SC.GPU"),
        ({"arrival": hopper.ARRIVAL[:4] + hopper.ARRIVAL[6:]}, "ATOMG.E.ADD.STRONG.GPU BAR.SYNC, not"),
        ({"loop": None}, "no loop"),
        ({"loop": LOOP._replace(opcodes={"HGMMA.64x256x16.F32": 3})}, "3 products in a step"),
        ({"loop": LOOP._replace(in_flight=0)}, "0 products in flight"),
        ({"loop": LOOP._replace(from_registers=2)}, "through registers"),
        ({"loop": LOOP._replace(opcodes=LOOP.opcodes | {"BAR.SYNC.DEFER_BLOCKING": 1})}, "wait for one another"),
        ({"loop": LOOP._replace(instructions=600)}, "issues instructions for 1.17"),
    ],
)
def test_what_is_missing_is_told(change, said):
    assert any(said in problem for problem in hopper.problems(CODE._replace(**change)))


def test_an_arrival_is_read_from_the_code():
    wait = "BAR.SYNC.DEFER_BLOCKING"
    names = wait, "STG.E.128", wait, "IADD3", *hopper.ARRIVAL[1:-1], wait, "LDG.E.128", wait
    code = [hopper.Instruction(16 * i, name, "") for i, name in enumerate(names)]
    assert hopper.arrival(code) == hopper.ARRIVAL
    assert hopper.arrival(code[1:3]) == ()


@pytest.mark.parametrize(
    "printed, said", [(None, "cuobjdump failed with status"), ("", "x.so has no symmetric_kernel")]
)
def test_a_library_without_the_product_is_refused_in_words(monkeypatch, capsys, printed, said):
    if printed is not None:
        monkeypatch.setattr(hopper, "run", lambda command: printed)
    monkeypatch.setattr("sys.argv", ["hopper", "x.so"])
    assert hopper.main() == 1
    captured = capsys.readouterr()
    assert said in captured.err and not captured.out
