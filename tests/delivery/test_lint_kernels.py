"""What the package can launch passes the lint, and each planted fault or drawback is named."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from tools.lint import binary, cases, judgements, machine_code
from tools.lint import kernels as lint

CAPABILITIES = {"sm_80": 80, "sm_90": 90, "sm_100": 100, "sm_120": 120}
WIDE = cases.Case("sm_90", "wide", "bfloat16", 2048, 4096, (128, 64, 8, 8, 3))
OPCODES = {"HGMMA.64x128x16.F32.BF16": 4, "UTMALDG.3D": 8, "STG.E.128": 16}
GOOD_LOOP = machine_code.Loop(85, {"HGMMA.64x128x16.F32.BF16": 4, "BAR.SYNC.DEFER_BLOCKING": 3}, in_flight=1)
GOOD = binary.Facts(98328, 90, 0, OPCODES, 128 * 128 * 64, False, GOOD_LOOP, store_bits=128)
DOT = 'tl.dot(a, b, sums, input_precision="ieee")'
GFX = "gfx942", "v_mfma_f32_16x16x8_xf32", "v_mfma_f32_32x32x2_f32"


@pytest.fixture
def package(variant: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(variant, tmp_path / "package"))


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def refusal(package: Path, case: cases.AnyCase) -> str:
    return "; ".join(lint.examine(package, case).problems)


@pytest.mark.slow
def test_fast_cases_pass_on_three_gpu_generations(variant):
    rows = lint.examine_all(variant, cases.fast_cases(variant))
    for kernel in "symmetric_gemm", "small_polar":
        pairs = {(row.case.gpu, row.case.competes) for row in rows if row.case.kernel == kernel}
        assert pairs >= {("sm_80", False), ("sm_90", False), ("sm_100", False), ("sm_90", True)}
    assert not [(row.case.name, *row.problems) for row in rows if row.problems]
    assert all("1 block" in reason and row.case.competes for row in rows for reason in row.drawbacks)
    assert {row.case.config[0] for row in rows if row.case.promises_speed(variant)} == {64, 128, 256}


def test_every_symmetric_gemm_config_is_linted(kernel, variant):
    tuned = kernel.kernels.gpu.tuned
    linted = {(case.gpu, case.dtype, tuple(case.config)) for case in cases.all_cases(variant)}
    sides = (1, 64, 256, 257, 768, 769, 1000, 4096, 20000)
    dtypes = kernel.kernels.operands.TRITON_DTYPES
    for gpu, dtype, m, *flags in itertools.product(cases.GPUS, dtypes, sides, (False, True), (False, True)):
        if flags[0] and not cases.takes_descriptors(gpu, variant):
            continue
        target = tuned.Target("cuda", CAPABILITIES[gpu]) if gpu in CAPABILITIES else tuned.Target("hip", 0)
        config = tuple(tuned.safe_config(target, dtype, m, *flags))
        names = {"bfloat16", "float16"} if dtype.itemsize == 2 else {"float32"}
        assert any((gpu, name, config) in linted for name in names), (gpu, dtype, m, flags, config)


def test_configurations_that_compete_are_linted_with_the_operands_of_a_step(kernel, variant):
    tuned = kernel.kernels.gpu.tuned
    products = [case for case in cases.all_cases(variant) if case.kernel == "symmetric_gemm"]
    linted = {(case.gpu, case.layout, tuple(case.config)) for case in products}
    for gpu in cases.GPUS:
        target = tuned.Target("cuda", CAPABILITIES[gpu]) if gpu in CAPABILITIES else tuned.Target("hip", 0)
        for config in {*tuned.usual_configs(target, torch.bfloat16)} - {*tuned.COMPILED}:
            for layout in "wide", "tall", "square", "commuting":
                assert (gpu, layout, tuple(config)) in linted, (gpu, layout, config)


def test_spills_are_a_problem_of_what_is_chosen_and_a_drawback_of_what_competes(variant):
    """256 rows of two tiles by 4 warps have too few registers."""
    crowded = WIDE._replace(layout="square", config=(256, 64, 8, 4, 2))
    chosen, competing = (lint.examine(variant, case) for case in (crowded, crowded._replace(competes=True)))
    assert re.search("spills [1-9]", "; ".join(chosen.problems)) and competing.problems == []
    assert re.search("spills [1-9]", competing.drawbacks[0])


def test_every_small_polar_config_is_linted(kernel, variant):
    tuned = kernel.kernels.gpu.tuned
    linted = {(case.gpu, case.dtype, case.config) for case in cases.all_cases(variant) if case.kernel == "small_polar"}
    for gpu, dtype, m in itertools.product(cases.GPUS, ("float16", "bfloat16", "float32"), range(1, 129)):
        target = tuned.Target("cuda", CAPABILITIES[gpu]) if gpu in CAPABILITIES else tuned.Target("hip", 0)
        of_dtype = getattr(torch, dtype)
        assert (gpu, dtype, tuple(tuned.safe_small_config(target, of_dtype, m))) in linted, (gpu, dtype, m)
        for config in tuned.usual_small_configs(target, of_dtype, tuned.padded_side(m)):
            assert (gpu, dtype.replace("bfloat16", "float16"), tuple(config)) in linted, (gpu, dtype, m, config)


def test_measured_configs_are_linted_in_every_layout(package):
    """A file that does not name its target raises."""
    entry = dict(m=2048, k=8192, tile=128, tile_k=64, group=4, warps=8, stages=3, sections=1, gain=1.3)
    (package / "kernels/speeds/configs").mkdir(exist_ok=True)
    file = package / "kernels/speeds/configs/NVIDIA_H200.json"
    small = {"m": 60, "k": 256, "side": 64, "width": 32, "depth": 64, "warps": 8, "stages": 2, "on_chip": 0}
    tables = {"symmetric_gemm": {"bfloat16": [entry]}, "small_polar": {"float16": 2 * [small | {"gain": 1.3}]}}
    file.write_text(json.dumps({"target": "sm_90", **tables}))
    selection = [case for case in cases.all_cases(package) if case.config == (128, 64, 4, 8, 3, 1)]
    assert {case.layout for case in selection} >= {"wide", "tall", "square", "repeated"}
    selection = [case for case in cases.all_cases(package) if case.config == (64, 32, 64, 8, 2, 0)]
    assert [(case.kernel, case.aligned) for case in selection] == [("small_polar", True), ("small_polar", False)]
    edit(file, "sm_90", "Hopper")
    with pytest.raises(ValueError, match=r"NVIDIA_H200\.json must say its target, one of sm_80.*got Hopper"):
        cases.all_cases(package)


def test_symmetric_gemm_configs_that_do_not_fit_are_refused(variant):
    """In processes of their own, as `make lint-kernels` examines all; other tests compile in this one."""
    planted = {
        ("sm_80", (256, 64, 8, 4, 2)): "spills [1-9]",
        ("sm_90", (128, 128, 8, 8, 4)): "needs .* bytes of shared memory, a block has 232448",
        ("sm_100", (256, 64, 8, 2, 2)): "spills [1-9]",
        ("sm_90", (100, 64, 8, 8, 3)): "does not compile",
    }
    rows = lint.examine_all(variant, [WIDE._replace(gpu=gpu, config=config) for gpu, config in planted], jobs=2)
    for row, complaint in zip(rows, planted.values()):
        assert re.search(complaint, "; ".join(row.problems)), row.case


def test_small_polar_configs_that_do_not_fit_are_refused(variant):
    planted = {
        ("float16", (128, 128, 64, 4, 2, 0)): "spills [1-9]",
        ("float16", (64, 64, 64, 4, 2, 1)): "spills [1-9]",
        ("float16", (128, 64, 64, 8, 10, 0)): "needs .* bytes of shared memory, a block has 166912",
        ("float16", (128, 48, 64, 8, 2, 0)): "does not compile",
    }
    small = [cases.SmallPolarCase("sm_80", True, dtype, config[0], config) for dtype, config in planted]
    for case, complaint in zip(small, planted.values()):
        assert re.search(complaint, refusal(variant, case)), case


def test_step_with_extra_products_is_refused(package):
    sums = "sums = panel(A, B, first, SIDE, SIDE, WIDTH, DEPTH)"
    edit(package / "kernels/gpu/panels.py", sums, "\n    ".join([sums, *7 * [sums.replace("sums =", "sums +=", 1)]]))
    case = cases.SmallPolarCase("sm_80", True, "float16", 64, (64, 64, 64, 4, 2, 0))
    assert "multiplies" in refusal(package, case)


@pytest.mark.parametrize(
    ("instead", "complaint"),
    [
        ("sums + tl.sum(a.to(tl.float32)) + tl.sum(b.to(tl.float32))", "no matrix instruction HGMMA"),
        (f"tl.dot(b.T, a.T, {DOT})", "multiplies 2 times what a tile needs"),
    ],
)
def test_kernel_not_multiplying_each_tile_once_is_refused(package, instead, complaint):
    edit(package / "kernels/gpu/symmetric_gemm.py", DOT, instead)
    assert complaint in refusal(package, WIDE)


def test_launch_without_a_fault_passes():
    assert list(judgements.problems(WIDE, GOOD, True)) == list(judgements.drawbacks(WIDE, GOOD)) == []


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"shared": 232449}, "needs 232449 bytes of shared memory, a block has 232448"),
        ({"registers": 264}, "cannot start: 8 warps of 264 registers"),
        ({"spilled": 8}, "spills 8 bytes"),
        ({"opcodes": OPCODES | {"LDL.64": 2}}, "spills 0 bytes of registers by 2 instructions"),
        ({"opcodes": {"BPT.TRAP": 1, "HGMMA.64x128x16.F32.BF16": 4, "UTMALDG.3D": 8}}, "stores nothing"),
        ({"opcodes": OPCODES | {"HGMMA.64x128x16.F32.BF16": 0, "HMMA.16816.F32": 64}}, "no matrix instruction HGMMA"),
        ({"opcodes": OPCODES | {"UTMALDG.3D": 1}}, "loads two operands by 1 descriptor loads"),
        ({"specialized": True}, "gives warps different work"),
        ({"work": 128 * 128 * 32}, "multiplies 0.5 times"),
        ({"work": 2 * 128 * 128 * 64}, "multiplies 2 times"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_fault_is_named(changed, complaint):
    (problem,) = judgements.problems(WIDE, GOOD._replace(**changed), True)
    assert complaint in problem


@pytest.mark.parametrize(
    ("changed", "in_loop", "complaint"),
    [
        ({}, {"in_flight": 0}, "has 0 products in flight while it loads"),
        ({}, {"in_flight": None}, "has 0 products in flight while it loads"),
        ({}, {"from_registers": 2}, "takes operands of 2 products from registers"),
        ({}, {"opcodes": GOOD_LOOP.opcodes | {"LDS.64": 1, "STS": 2}}, "accesses shared memory by 3 loads and stores"),
        ({}, {"opcodes": {"BAR.SYNC": 6}}, "has 6 barriers in a step of 64"),
        ({"store_bits": 64}, {}, "stores 64 bits at a time"),
        ({"shared": 131104}, {}, "has 1 block on a multiprocessor"),
        ({"registers": 136}, {}, "has 1 block on a multiprocessor"),
        ({}, {"instructions": 257}, "issues instructions for 1.00"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_drawback_is_named(changed, in_loop, complaint):
    (drawback,) = judgements.drawbacks(WIDE, GOOD._replace(**changed, loop=GOOD_LOOP._replace(**in_loop)))
    assert complaint in drawback


def test_small_tiles_are_slow_by_their_bytes():
    """A tile of 32 does 16 FLOPs to the byte; it has few products for the instructions of its loop, too."""
    tiny, loop = WIDE._replace(config=(32, 64, 8, 4, 3)), GOOD_LOOP._replace(instructions=16)
    (drawback,) = judgements.drawbacks(tiny, GOOD._replace(loop=loop))
    assert "does 16 FLOPs for a byte of its tile" in drawback


def test_configs_that_never_win_are_named(variant):
    """Of tiles of 128 three stages leave room for a second block, and four do not."""
    planted = {
        (128, 64, 8, 8, 3): "",
        (128, 64, 8, 8, 2): "",
        (128, 64, 8, 8, 4): "1 block on a multiprocessor",
        (128, 64, 8, 8, 1): "0 products in flight",
        (128, 32, 8, 8, 3): "barriers in a step of 32",
        (32, 64, 8, 4, 3): "no matrix instruction HGMMA.*16 FLOPs for a byte",
    }
    for config, complaint in planted.items():
        row = lint.examine(variant, WIDE._replace(config=config))
        findings = "; ".join((*row.problems, *row.drawbacks))
        assert re.search(complaint, findings) and bool(findings) == bool(complaint), (config, findings)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (DOT, "tl.dot((2 * a).to(b.dtype), b, sums)", "takes operands of [1-9]"),
        (DOT, f"{DOT} + tl.sum(tl.sum(a.to(tl.float32), 1), 0)", "accesses shared memory by [1-9]"),
        ("C += wide_matrix * C_batch", "C += wide_matrix * C_batch + 4", "stores 64 bits at a time"),
    ],
)
def test_kernel_with_a_slow_loop_or_store_is_named(package, old, new, complaint):
    edit(package / "kernels/gpu/symmetric_gemm.py", old, new)
    row = lint.examine(package, WIDE)
    assert any(re.search(complaint, reason) for reason in row.drawbacks), row


def test_speed_is_judged_of_aligned_halves_on_sm_90(variant):
    judged = {"wide": True, "square": True, "transposed_result": True, "spread": False, "shifted_addend": False}
    for layout, expected in judged.items():
        assert WIDE._replace(layout=layout).promises_speed(variant) == expected, layout
    for other in ({"dtype": "float32"}, {"gpu": "sm_100"}, {"m": 2047}):
        assert not WIDE._replace(layout="square", **other).promises_speed(variant), other


@pytest.mark.parametrize("gpu, rounding, exact", [("sm_80", "HMMA.1688.F32.TF32", "FFMA"), GFX])
def test_float32_cases_refuse_rounding_instructions(gpu, rounding, exact):
    case = WIDE._replace(gpu=gpu, dtype="float32", config=(64, 32, 8, 8, 2))
    facts = binary.Facts(16384, 80, 0, {"STG.E.128": 1, "global_store_dwordx4": 1}, 64 * 64 * 32, False)
    assert list(judgements.problems(case, facts._replace(opcodes=facts.opcodes | {exact: 64}), False)) == []
    (problem,) = judgements.problems(case, facts._replace(opcodes=facts.opcodes | {rounding: 64}), False)
    assert "round" in problem


def test_work_counts_only_products_inside_loops():
    product = "tt.dot %a, %b, %c : tensor<64x32xf16, #x> * tensor<32x128xf16, #y> -> tensor<64x128xf32, #z>"
    loop = ["%r = scf.for %i = %0 to %k step %s {", product, "scf.if %p {", product, "}", "scf.yield {a = 1}", "}"]
    assert binary.loop_work("\n".join([product, *loop, product])) == 2 * 64 * 32 * 128
