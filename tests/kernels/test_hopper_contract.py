"""The compiled product for Hopper refuses what does not fit before it writes; tests/hopper_model makes its checks."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_hopper_model import AT_ONCE, SQUARE, integers
from tests.support import hopper_model
from tests.support.hopper_model import Scalars, Way

pytestmark = pytest.mark.usefixtures("hopper_operations")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda o: o.update(A=o["A"].float()), "float16 or bfloat16"),
        (lambda o: o.update(A=o["A"][:, :, :0]), "0 < k"),
        (lambda o: o.update(A=o["A"][:, :12]), "multiple of 8"),
        (lambda o: o.update(B=o["B"][:, :, :8]), r"B must be \(2, 24, 16\)"),
        (lambda o: o.update(B=o["B"].bfloat16()), "B must be Half like A"),
        (lambda o: o.update(C=o["C"][:, :8]), r"C must be \(2, 16, 16\)"),
        (lambda o: o.update(D=torch.zeros(2, 16, 24).half()), r"D must be \(2, 16, 16\)"),
        (lambda o: o.update(D=o["C"]), "must not share memory"),
        (lambda o: o.update(A=(M := torch.full((2, 16, 24), 7.0).half()), C=M[:, :, :16]), "must not share memory"),
        (lambda o: o.update(B=(M := torch.full((2, 24, 16), 7.0).half()), C=M[:, :16]), "must not share memory"),
        (lambda o: o.update(A=torch.zeros(2, 16, 28).half()[:, :, :24]), "A must have a stride of 1"),
        (lambda o: o.update(A=torch.zeros(2 * 16 * 24 + 1).half()[1:].view(2, 16, 24)), "modulo 16"),
        (lambda o: o.update(A=o["A"][:1].expand(2, 16, 24)), "multiples of 16 bytes"),
        (lambda o: o.update(A=o["A"][:, :1].expand(2, 16, 24)), "multiples of 16 bytes"),
        (lambda o: o.update(A=torch.zeros(800).half().as_strided((2, 16, 24), (388, 24, 1))), "multiples of 16 bytes"),
        (
            lambda o: o.update(A=torch.ones(2, 24, 16).half().mT, B=torch.ones(2, 16, 24).half().mT),
            "runs along m needs B",
        ),
        (lambda o: o.update(D=torch.zeros(2, 16, 20).half()[:, :, :16]), "D must have a stride of 1"),
    ],
)
def test_what_does_not_fit_raises_and_nothing_is_written(change, message):
    A = torch.ones(2, 16, 24).half()
    operands = {"C": torch.full((2, 16, 16), 7.0).half(), "A": A, "B": A.mT, "D": None}
    change(operands)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.hopper_model.product(*operands.values(), *Scalars(), 1, *Way())
    assert (operands["C"] == 7).all()


@pytest.mark.parametrize("sections", [0, -1, 9])
def test_sections_that_cannot_be_raise(sections):
    A = torch.ones(1, 16, 64).half()
    with pytest.raises(RuntimeError, match=f"sections must be 1 to 8, got {sections}"):
        hopper_model.product(A, A.mT, sections=sections)


# The largest that are counted in 31 bits: k, squares along a side, squares of all matrices, the same with sections.
@pytest.mark.parametrize(
    "size, step, sections",
    [
        ((1, 8, 2**31 - 1), (0, 0, 1), 1),
        ((1, SQUARE * 46340, 8), (0, 8, 0), 1),
        (((2**31 - 1) // 3, 2 * SQUARE, 8), (1, 0, 0), 1),
        (((2**31 - 1) // (3 + 8 * AT_ONCE), 2 * SQUARE, 8), (1, 0, 0), 8),
    ],
)
def test_what_31_bits_cannot_count_is_refused(size, step, sections):
    for shape, message in (size, "B must be"), ((a + b for a, b in zip(size, step)), r"k < 2\^31|fewer than 2\^31"):
        one = torch.ones(1, 1, 1).half()
        with pytest.raises(RuntimeError, match=message):
            torch.ops.hopper_model.product(one, one.expand(*shape), one, None, *Scalars(), sections, *Way())


def test_one_matrix_may_have_any_stride_to_the_next():
    A, room = integers(1, 16, 24, dtype=torch.float16), torch.zeros(400).half()
    apart = room.as_strided(A.shape, (5, 24, 1)).copy_(A)
    assert torch.equal(hopper_model.product(apart, apart.mT), hopper_model.product(A, A.mT))


def test_nothing_to_do_is_done():
    for count, m in ((0, 16), (2, 0)):
        A = torch.empty(count, m, 8).half()
        assert hopper_model.product(A, A.mT).numel() == 0
