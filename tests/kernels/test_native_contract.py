"""The compiled operations refuse what does not fit before they write, and are seen through by torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.operation_places import MODELLED, SHIPPED, on_every_place

COUNT, ROWS, COLS = 2, 3, 4

pytestmark = on_every_place(SHIPPED, MODELLED)


def ones(*shape, **options) -> Tensor:
    return torch.ones(*shape, **options)


def matrices(*shapes, dtype=torch.float32) -> list[Tensor]:
    return [ones(shape, dtype=dtype) for shape in shapes]


def pack_arguments() -> dict:
    same = [(ROWS, COLS)] * COUNT
    buffer = ones(COUNT, ROWS, COLS)
    return {"momentum": matrices(*same), "gradient": matrices(*same), "packed": buffer, "beta": 0.9, "nesterov": True}


def descend_arguments() -> dict:
    numbers = {"lr": ones(()), "weight_decay": ones(1), "multiplier": ones(COUNT)}
    return {"parameter": matrices(*[(ROWS, COLS)] * COUNT), "update": ones(COUNT, ROWS, COLS), **numbers}


HALVES = matrices((3, 4), (3, 4), dtype=torch.bfloat16)
REMAINDERS = matrices((3, 4), (3, 4), dtype=torch.int16)
REMAINDER = REMAINDERS[0]
NORMS = ones(2, dtype=torch.float64)
APART = ones(4, dtype=torch.float64)[::2]
BAD_PACKS = {
    "as many gradients": {"gradient": matrices((3, 4))},
    "must be a matrix": {"momentum": matrices((3, 4), (3, 4, 1))},
    "shape .3, 4. of its": {"gradient": matrices((3, 4), (4, 3))},
    "gradient.1. must have the shape .3, 4. .* got .3, 5.": {"gradient": matrices((3, 4), (3, 5))},
    "gradient.0. must have the shape .3, 4. .* got .2, 4.": {"gradient": matrices((2, 4), (3, 4))},
    "have one dtype": {"gradient": [ones(3, 4), ones(3, 4, dtype=torch.float16)]},
    "one dtype, got Float and Double at 2": {
        "momentum": [*matrices((3, 4), (3, 4)), ones(3, 4, dtype=torch.float64)],
        "gradient": matrices((3, 4), (3, 4), (3, 4)),
        "packed": ones(3, 3, 4),
    },
    "float32, float64": {"momentum": matrices((3, 4), (3, 4), dtype=torch.int32)},
    "beta must be from 0 to 1, got 1.5": {"beta": 1.5},
    "beta must be from 0 to 1, got -0.5": {"beta": -0.5},
    "its last two sizes": {"packed": ones(2, 4, 3)},
    "its last two sizes, got .3, 4. at 0": {"packed": ones(2, 3, 5)},
    "its last two sizes, got .4, 4. at 1": {"momentum": matrices((3, 4), (4, 4))},
    "must be .2, rows, cols.": {"packed": ones(3, 3, 4)},
    "packed is written": {"packed": ones(1, 3, 4).expand(2, 3, 4)},
    "momentum is written": {"momentum": [ones(3, 4), ones(3, 1).expand(3, 4)]},
    "outside of packed": {"packed": ones(24), "offsets": [0, 13]},
    "offsets.0. = -1": {"packed": ones(24), "offsets": [-1, 12]},
    "overlap": {"packed": ones(24), "offsets": [11, 0]},
    "one per matrix": {"packed": ones(24), "offsets": [0]},
    "contiguous and 1-D where offsets are given, got shape .2, 3, 4.": {"offsets": [0, 12]},
    "contiguous and 1-D where offsets are given, got shape .24.": {"packed": ones(48)[::2], "offsets": [0, 12]},
    "active must be Bool": {"active": ones(2)},
    "active must have 2": {"active": torch.tensor([True])},
    "found_inf must be Float": {"found_inf": torch.tensor(True)},
    "grad_scale must have 1": {"grad_scale": ones(2)},
    "norms need a batch": {"packed": ones(24), "offsets": [0, 12], "norms": NORMS},
    "but packed is Double": {"packed": ones(2, 3, 4, dtype=torch.float64), "norms": NORMS},
    "norms must be float64": {"norms": ones(2)},
    "norms must be .2., contiguous, got .1.": {"norms": NORMS[:1]},
    "norms must be .2., contiguous, got .3.": {"norms": ones(3, dtype=torch.float64)},
    "norms must be .2., contiguous, got .2.": {"norms": APART},
}
BAD_DESCENTS = {
    "must be a matrix": {"parameter": [ones(3, 4), ones(12)]},
    "its last two sizes": {"update": ones(2, 4, 3)},
    "must be .1, rows, cols.": {"parameter": matrices((3, 4))},
    "have one dtype": {"parameter": [ones(3, 4), ones(3, 4, dtype=torch.float64)]},
    "parameter is written": {"parameter": [ones(3, 4), ones(1, 4).expand(3, 4)]},
    "outside of update": {"update": ones(24), "offsets": [0, 13]},
    "lr must have 1 or 2": {"lr": ones(3)},
    "multiplier must have 2 elements, contiguous": {"multiplier": ones(4)[::2]},
    "multiplier must be Float": {"multiplier": ones(2, dtype=torch.float16)},
    "weight_decay must be Float": {"weight_decay": torch.tensor(1)},
    "decay_mode must be .* got 3": {"decay_mode": 3},
    "decay_mode must be .* got -1": {"decay_mode": -1},
    "row_scale must have 6": {"row_scale": ones(5)},
    "row_scale must be Float": {"row_scale": ones(6, dtype=torch.float64)},
    "for float16 and bfloat16": {"seeds": torch.tensor([1, 2])},
    "bfloat16 parameters, got Double": {"seeds": torch.tensor([1, 2]), "parameter": [*ones(2, 3, 4).double()]},
    "seeds must be Long": {"seeds": ones(2), "parameter": matrices((3, 4), (3, 4), dtype=torch.float16)},
    "origins must be 3 per": {"origins": [0, 0, 4]},
    "around its 3 x 4 elements, got .0, 1, 4.": {"origins": [0, 0, 4, 0, 1, 4]},
    "around its 3 x 4 elements, got .0, -1, 4.": {"origins": [0, 0, 4, 0, -1, 4]},
    "around its 3 x 4 elements, got .-1, 0, 4.": {"origins": [-1, 0, 4, 0, 0, 4]},
    f"around its 3 x 4 elements, got .0, {2**63 - 1}, 4.": {"origins": [0, 2**63 - 1, 4, 0, 0, 4]},
    f"around its 3 x 4 elements, got .{2**61}, 0, 4.": {"origins": [2**61, 0, 4, 0, 0, 4]},
    f"around its 3 x 4 elements, got .{2**61 - 3}, 0, 4.": {"origins": [2**61 - 3, 0, 4, 0, 0, 4]},
    f"around its 3 x 4 elements, got .0, 0, {-(2**63)}.": {"origins": [0, 0, -(2**63), 0, 0, 4]},
    "active must have 2": {"active": torch.tensor([True])},
    "found_inf must have 1": {"found_inf": ones(2)},
    "what bfloat16 parameters lack": {"remainder": matrices((3, 4), (3, 4), dtype=torch.int16)},
    "got parameters of Half": {"remainder": [*REMAINDERS], "parameter": [*ones(2, 3, 4).half()]},
    "remainder must be one per": {"remainder": [REMAINDER], "parameter": HALVES},
    "remainder must be Short": {"remainder": [*HALVES], "parameter": HALVES},
    "remainder.1. must have the shape": {"remainder": [REMAINDER, REMAINDER.mT], "parameter": HALVES},
    "remainder.1. must .* got .2, 4.": {"remainder": [REMAINDER, REMAINDERS[1][:2]], "parameter": HALVES},
    "remainder.1. must .* got .3, 3.": {"remainder": [REMAINDER, REMAINDERS[1][:, :3]], "parameter": HALVES},
    "remainder.0. must .* got .3, 4, 1.": {"remainder": [REMAINDER.unsqueeze(2), REMAINDER], "parameter": HALVES},
    "norms need a batch": {"update": ones(24), "offsets": [0, 12], "norms": NORMS},
    "but update is Double": {"update": ones(2, 3, 4, dtype=torch.float64), "norms": NORMS},
    "norms must be float64": {"norms": ones(2)},
    "norms must be .2., contiguous, got .1.": {"norms": NORMS[:1]},
    "norms must be .2., contiguous, got .2.": {"norms": APART},
    "nothing is left to round": {"remainder": [*REMAINDERS], "parameter": HALVES, "seeds": torch.tensor([1, 2])},
}

# A matrix, a batch of two, three matrices that are columns of one, and 24 elements in a row.
WIDE = ones(6, dtype=torch.float64)
ONE, PAIR, FUSED, FLAT = ones(3, 4), ones(2, 4, 3).mT, ones(3, 12).split(4, 1), ones(24)
BYTES = ONE.view(torch.bool).flatten()
SHARING_PACKS = {
    "one momentum twice": {"momentum": [ONE, ONE]},
    "one column slice twice": {"momentum": [FUSED[1], FUSED[1]]},
    "momentum of overlapping rows": {"momentum": [FLAT[:12].view(3, 4), FLAT[8:20].view(3, 4)]},
    "gradient of itself": {"momentum": [*PAIR], "gradient": [ONE, PAIR[1]]},
    "gradient of another": {"momentum": [ones(3, 4), ONE], "gradient": [ONE, ones(3, 4)]},
    "packed and momentum": {"packed": PAIR, "momentum": [ONE, PAIR[1]]},
    "packed and gradient": {"packed": PAIR, "gradient": [ONE, PAIR[1]]},
    "packed and columns": {"packed": FLAT.view(2, 3, 4), "gradient": [ONE, FLAT[6:].view(3, 6)[:, :4]]},
    "packed at offsets": {"packed": FLAT, "offsets": [0, 12], "momentum": [ONE, FLAT[3:15].view(3, 4)]},
    "norms and momentum": {"norms": WIDE[:2], "momentum": [ONE, WIDE.view(torch.float32).view(3, 4)]},
    "momentum and grad_scale": {"momentum": [ONE, ones(3, 4)], "grad_scale": ONE[2, 3]},
    "momentum and found_inf": {"momentum": [ONE, ones(3, 4)], "found_inf": ONE[2, 3]},
    "momentum and active": {"momentum": [ONE, ones(3, 4)], "active": BYTES[4:6]},
}
SHARING_DESCENTS = {
    "one parameter twice": {"parameter": [ONE, ONE]},
    "update and parameter": {"update": PAIR, "parameter": [ONE, PAIR[1]]},
    "update at offsets": {"update": FLAT, "offsets": [0, 12], "parameter": [ONE, FLAT[3:15].view(3, 4)]},
    "update behind lr in it": {"update": FLAT.view(2, 3, 4), "lr": FLAT[5], "parameter": [ONE, FLAT[9:21].view(3, 4)]},
    "parameter and row_scale": {"parameter": [ONE, ones(3, 4)], "row_scale": ONE.flatten()[5:11]},
    "one remainder twice": {"parameter": HALVES, "remainder": [REMAINDER, REMAINDER]},
    "parameter and remainder": {"parameter": HALVES, "remainder": [REMAINDER, HALVES[0].view(torch.int16)]},
    "norms and parameter": {"norms": WIDE[:2], "parameter": [ONE, WIDE.view(torch.float32).view(3, 4)]},
    "norms and update": {"norms": WIDE[:2], "update": WIDE.view(torch.bfloat16).view(2, 3, 4)},
    "parameter and lr": {"parameter": [ONE, ones(3, 4)], "lr": ONE[1, 1]},
    "parameter and weight_decay": {"parameter": [ONE, ones(3, 4)], "weight_decay": ONE[1, 1]},
    "parameter and multiplier": {"parameter": [ONE, ones(3, 4)], "multiplier": ONE[1, 1:3]},
    "parameter and found_inf": {"parameter": [ONE, ones(3, 4)], "found_inf": ONE[1, 1]},
    "parameter and active": {"parameter": [ONE, ones(3, 4)], "active": BYTES[4:6]},
    "parameter and seeds": {"parameter": HALVES, "seeds": HALVES[0].view(torch.int64).flatten()[1:]},
}


def snapshot(arguments: dict) -> list[Tensor]:
    values = [v for value in arguments.values() for v in (value if isinstance(value, list) else [value])]
    return [v.clone() for v in values if isinstance(v, Tensor)]


def assert_refuses(op, arguments: dict, message: str) -> None:
    before = snapshot(arguments)
    with pytest.raises(RuntimeError, match=message):
        op(**arguments)
    assert all(torch.equal(a, b) for a, b in zip(snapshot(arguments), before))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("message", BAD_PACKS)
def test_bad_arguments_of_momentum_pack_raise(native, message):
    assert_refuses(native.momentum_pack_, {**pack_arguments(), **BAD_PACKS[message]}, message)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("message", BAD_DESCENTS)
def test_bad_arguments_of_descend_raise_and_nothing_is_written(native, message):
    assert_refuses(native.descend_, {**descend_arguments(), **BAD_DESCENTS[message]}, message)


@pytest.mark.parametrize("case", SHARING_PACKS)
def test_shared_memory_of_momentum_and_packed_raises(native, case):
    assert_refuses(native.momentum_pack_, {**pack_arguments(), **SHARING_PACKS[case]}, "must not share memory")


@pytest.mark.parametrize("case", SHARING_DESCENTS)
def test_parameters_share_no_memory_and_nothing_is_written(native, case):
    assert_refuses(native.descend_, {**descend_arguments(), **SHARING_DESCENTS[case]}, "must not share memory")


def test_the_refusal_names_what_shares_memory(native):
    with pytest.raises(RuntimeError, match=r"momentum\[1\] and gradient\[0\] must not.*: momentum\[1\] is written"):
        native.momentum_pack_(**pack_arguments() | SHARING_PACKS["gradient of another"])


def test_parts_of_one_buffer_that_share_no_element_are_accepted(native):
    """Columns of one matrix, as of q, k and v; rows that end where others start; nothing; inputs may share anything."""
    weights, rows, (lr, decay) = torch.randn(6, 20), torch.randn(12, 5), torch.tensor([0.1, 0.2])
    for parts in weights.split(5, 1), [x.clone() for x in weights.split(5, 1)]:
        native.momentum_pack_([*parts[:2]], [parts[2], parts[2]], ones(2, 6, 5), 0.9, True)
        twins = [x.clone() for x in parts]
    assert torch.equal(weights, torch.cat(twins, 1))
    native.descend_([*parts[:2]], torch.stack(parts[2:]), lr, decay, lr)
    native.descend_([*weights.split(5, 1)[:2]], weights[:, 10:].unflatten(1, (2, 5)).transpose(0, 1), lr, decay, lr)
    assert torch.equal(weights, torch.cat(parts, 1))
    native.descend_([rows[:6], rows[6:], rows[:0]], ones(60), lr, decay, lr, offsets=[0, 30, 60])


def test_a_dimension_of_one_may_have_any_stride(native):
    """Even 0, by which several elements would overlap."""
    column, twin = ones(6).as_strided((3, 1), (2, 0)), ones(3, 1)
    for momentum in column, twin:
        native.momentum_pack_([momentum], [2 * ones(3, 1)], ones(1, 3, 1), 0.9, True)
    assert torch.equal(column, twin) and not torch.equal(twin, ones(3, 1))


OPTIONS = {
    "batch": {},
    "norms": {"norms": NORMS},
    "offsets": {"offsets": [12, 0], "active": torch.tensor([True, False]), "found_inf": torch.zeros(1)},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_operations_keep_torchs_rules_for_operators(native, case):
    """Schema, fake kernel and tracing under dynamic shapes; there is no gradient to register."""
    flat = {"packed": ones(24), "update": ones(24)} if case == "offsets" else {}
    for op, arguments in (native.momentum_pack_, pack_arguments()), (native.descend_, descend_arguments()):
        arguments |= {name: value for name, value in flat.items() if name in arguments} | OPTIONS[case]
        utilities = "test_schema", "test_faketensor", "test_aot_dispatch_dynamic"
        torch.library.opcheck(op.default, (), arguments, test_utils=utilities)


def test_a_compiled_step_is_the_eager_one(native):
    def step(momentum, gradient, parameter, lr):
        packed = torch.empty(COUNT, COLS, ROWS, dtype=torch.bfloat16)
        native.momentum_pack_(momentum, gradient, packed.mT, 0.9, True)
        native.descend_(parameter, packed.mT, lr, ones(1), ones(COUNT))
        return packed * 2

    def inputs():
        generator = torch.Generator().manual_seed(0)
        return [list(torch.randn(COUNT, ROWS, COLS, generator=generator)) for _ in range(3)], torch.tensor(0.1)

    (lists, lr), (twins, _) = inputs(), inputs()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*lists, lr), step(*twins, lr))
    assert all(torch.equal(a, b) for x, y in zip(lists, twins) for a, b in zip(x, y))
