"""Iterations in one call refuse what does not fit before they write, and are seen through by torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

COEFFICIENTS = [4.0848, -6.8946, 2.927, 3.9505, -6.3029, 2.6377, 0.0, -1.5, 0.5]


def arguments(**changes) -> dict:
    matrices = {"X": torch.ones(2, 3, 4), "A": torch.ones(2, 3, 3), "B": torch.ones(2, 3, 3)}
    matrices = {name: x.bfloat16() for name, x in matrices.items()}
    return {**matrices, "coefficients": COEFFICIENTS, "alone": True, "instructions": "portable", **changes}


def gram_arguments(**changes) -> dict:
    keywords = {"X": torch.ones(2, 3, 4).bfloat16(), **{name: torch.ones(2, 3, 3) for name in "RHQT"}}
    keywords |= {"coefficients": COEFFICIENTS, "windows": [1, 2], "alone": True}
    return {**keywords, "instructions": "portable", "square_instructions": "portable", **changes}


ONES = torch.ones(100).bfloat16()
BAD = {
    r"X and A must be \(batch, m, n\)": {"X": ONES[:12].view(3, 4)},
    r"X and A must be \(batch, m, n\) and .*, got \(2, 3, 4\) and \(3, 3\)": {"A": ONES[:9].view(3, 3)},
    "X must be float32 or bfloat16": {"X": torch.ones(2, 3, 4).half()},
    "A must be .* as X is": {"A": torch.ones(2, 3, 3)},
    "B must be .* as X is": {"B": torch.ones(2, 3, 3)},
    r"A must be \(2, 3, 3\)": {"A": ONES[:32].view(2, 4, 4)},
    r"B must be \(2, 3, 3\)": {"B": ONES[:9].view(1, 3, 3)},
    "A must have room for a matrix": {"A": ONES[:0].view(0, 3, 3), "B": ONES[:0].view(0, 3, 3)},
    "X must have a stride of 1": {"X": ONES[:24].view(2, 4, 3).mT},
    "A must be contiguous": {"A": ONES[:24].view(2, 3, 4)[:, :, :3]},
    "B must be contiguous": {"B": ONES[:18].view(2, 3, 3).mT},
    "coefficients must be three for each step, got 4": {"coefficients": [1.0] * 4},
    "X is written, so its elements": {"X": ONES[:12].view(1, 3, 4).expand(2, 3, 4)},
    "must not share memory": {"A": ONES[:18].view(2, 3, 3), "B": ONES[:18].view(2, 3, 3)},
    "got mmx": {"instructions": "mmx"},
}
WIDE_ONES = torch.ones(100)
BAD_GRAMS = {
    r"X and R must be \(batch, m, n\)": {"R": WIDE_ONES[:9].view(3, 3)},
    "H must be .* whatever X is, got BFloat16": {"H": ONES[:18].view(2, 3, 3)},
    r"T must be \(2, 3, 3\), got \(1, 3, 3\)": {"T": WIDE_ONES[:9].view(1, 3, 3)},
    "Q must be contiguous": {"Q": WIDE_ONES[:18].view(2, 3, 3).mT},
    "must not share memory": {"R": WIDE_ONES[:18].view(2, 3, 3), "T": WIDE_ONES[:18].view(2, 3, 3)},
    "coefficients must be three for each step, got 4": {"coefficients": [1.0] * 4},
    r"windows must have at least one step each, got \(3, 0\)": {"windows": [3, 0]},
    r"windows must have 3 steps in all, got \(1, 1\)": {"windows": [1, 1]},
    r"windows must have 3 steps in all, got \(9.*5807, 9.*5807, 5\)": {"windows": [2**63 - 1, 2**63 - 1, 5]},
    "got mmx": {"instructions": "mmx"},
    "got sse": {"square_instructions": "sse"},
}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_raise_and_nothing_is_written(native, message):
    refuses(native.newton_schulz_, arguments(**BAD[message]), message)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("message", BAD_GRAMS)
def test_bad_arguments_of_the_gram_iteration_raise_and_nothing_is_written(native, message):
    refuses(native.gram_newton_schulz_, gram_arguments(**BAD_GRAMS[message]), message)


def refuses(operation, keywords: dict, message: str) -> None:
    tensors = [value for value in keywords.values() if isinstance(value, Tensor)]
    before = [x.clone() for x in tensors]
    with pytest.raises(RuntimeError, match=message):
        operation(**keywords)
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("name, keywords", [("newton_schulz_", arguments()), ("gram_newton_schulz_", gram_arguments())])
def test_the_operations_keep_torchs_rules_for_operators(native, name, keywords):
    utilities = "test_schema", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(getattr(native, name).default, (), keywords, test_utils=utilities)
