"""The product on a CPU refuses what does not fit before it writes, and is seen through by torch.compile."""

from __future__ import annotations

import pytest
import torch

from tests.support.gemm_kinds import BFLOAT16, FLOAT32, SETS

PLAIN = 1.0, 0.0  # alpha, beta


@pytest.mark.kernels_ci
@pytest.mark.parametrize(("dtype", "other"), [(BFLOAT16, FLOAT32), (FLOAT32, BFLOAT16)], ids=str)
def test_instructions_are_asked_for_by_name(native, dtype, other):
    best, X, names = native.gemm_instructions(dtype), torch.ones(1, 4, 4, dtype=dtype), SETS[dtype]
    assert best in names
    for name in ("mmx", "", *names[: names.index(best)], SETS[other][0]):
        with pytest.raises(RuntimeError, match=rf"must be one of .*{best}(.*portable)?; got {name}"):
            native.gemm_(torch.empty_like(X), X, X, None, *PLAIN, False, name)


def test_other_dtypes_have_no_instructions(native):
    with pytest.raises(RuntimeError, match="must be float32 or bfloat16, got float64"):
        native.gemm_instructions(torch.float64)


def arguments(**changes) -> dict:
    operands = {"C": torch.ones(2, 3, 4), "A": torch.ones(2, 3, 5), "B": torch.ones(2, 5, 4), "D": None}
    operands = {name: x if x is None else x.bfloat16() for name, x in operands.items()}
    numbers = {"alpha": 1.0, "beta": 0.0, "symmetric": False, "instructions": "portable"}
    return operands | numbers | changes


ONES = torch.ones(400).bfloat16()
BAD = {
    "A and B must be .batch": {"A": ONES[:15].view(3, 5)},
    r"B must be \(2, 5, 4\)": {"B": ONES[:32].view(2, 4, 4)},
    r"B must be \(2, 5, 4\), got \(1": {"B": ONES[:20].view(1, 5, 4)},
    r"C must be \(2, 3, 4\)": {"C": ONES[:30].view(2, 3, 5)},
    r"D must be \(2, 3, 4\)": {"D": ONES[:12].view(3, 4)},
    "A must be float32 or bfloat16": {"A": torch.ones(2, 3, 5).half()},
    "B must be .* as A is": {"B": torch.ones(2, 5, 4).half()},
    "C must be .* as A is, or float32, got ": {"C": torch.ones(2, 3, 4).half()},
    "D must be .* as C is": {"D": torch.ones(2, 3, 4)},
    "D must be .* as C is, got B": {"C": torch.ones(2, 3, 4), "D": ONES[:24].view(2, 3, 4)},
    "A must have a stride of 1": {"A": ONES.as_strided((2, 3, 5), (100, 30, 2))},
    "C must have a stride of 1": {"C": ONES[:24].view(2, 4, 3).mT},
    "D must have a stride of 1": {"D": ONES[:24].view(2, 4, 3).mT},
    "symmetric result must be square": {"symmetric": True},
    "C is written": {"C": ONES[:12].view(1, 3, 4).expand(2, 3, 4)},
}
SHARED = ONES.clone()
ROWS_OF_B, SQUARE, WIDE_SQUARE = SHARED[:40].view(2, 5, 4), SHARED[:32].view(2, 4, 4), SHARED[:64].view(torch.float32)
SHARING = {
    "A": {"C": SHARED[:24].view(2, 3, 4), "A": SHARED[20:50].view(2, 3, 5)},
    "B": {"C": SHARED[:24].view(2, 3, 4), "B": ROWS_OF_B},
    "D": {"C": SHARED[:24].view(2, 3, 4), "D": SHARED[:24].view(2, 3, 4)},
    "rows of B": {"C": ROWS_OF_B[:, :3], "B": ROWS_OF_B},
    "B's transpose": {"C": SQUARE, "A": ONES[:32].view(2, 4, 4), "B": SQUARE.mT},
    "B of a symmetric result": {"C": SQUARE, "A": ONES[:32].view(2, 4, 4), "B": SQUARE, "symmetric": True},
    "B of a wider result": {"C": WIDE_SQUARE.view(2, 4, 4), "A": ONES[:32].view(2, 4, 4), "B": SQUARE},
    "D's rows, where C is B": {"C": SQUARE, "A": ONES[:32].view(2, 4, 4), "B": SQUARE, "D": SHARED[4:36].view(2, 4, 4)},
}


@pytest.mark.kernels_ci
def test_operands_of_two_dtypes_are_refused(native):
    with pytest.raises(RuntimeError, match=r"B must be .* as A is, got "):
        native.gemm_(**arguments(A=torch.ones(2, 3, 5)))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_raise_and_nothing_is_written(native, message):
    keywords = arguments(**BAD[message])
    before = keywords["C"].clone()
    with pytest.raises(RuntimeError, match=message):
        native.gemm_(**keywords)
    assert torch.equal(keywords["C"], before)


@pytest.mark.parametrize("name", SHARING)
def test_the_result_shares_no_memory(native, name):
    with pytest.raises(RuntimeError, match="must not share memory: C is written"):
        native.gemm_(**arguments(**SHARING[name]))
    assert (SHARED == 1).all()


@pytest.mark.parametrize("dtype", SETS, ids=str)
def test_a_dimension_of_one_may_have_any_stride(native, dtype):
    """A column of a matrix has a stride that leads nowhere."""
    A, B, D = (torch.arange(1.0, 1 + 2 * rows).view(2, rows, 1).to(dtype) for rows in (33, 1, 33))
    apart = [torch.empty(1000, dtype=dtype).as_strided(x.shape, (400, 7, 5)).copy_(x) for x in (A, B, D, D)]
    expected = torch.empty_like(D)
    native.gemm_(expected, A, B, D, 2.0, 3.0, False, "portable")
    native.gemm_(apart[3], *apart[:3], 2.0, 3.0, False, "portable")
    assert torch.equal(apart[3], expected)


def test_the_operation_keeps_torchs_rules_for_operators(native):
    utilities = "test_schema", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(native.gemm_.default, (), arguments(), test_utils=utilities)


@pytest.mark.parametrize("dtype", SETS, ids=str)
def test_a_compiled_product_is_the_eager_one(native, dtype):
    def square(X):
        C = torch.empty_like(X)
        native.gemm_(C, X, X.mT, None, *PLAIN, True, native.gemm_instructions(dtype))
        return C * 2

    X = torch.randn(2, 40, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(torch.compile(square, fullgraph=True, backend="aot_eager")(X), square(X))
