"""move_blocks_ refuses what does not fit before it writes, and is seen through by torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.operation_places import MODELLED, SHIPPED, on_every_place

FIELDS = "count", "position", "top", "left", "rows", "cols", "offset", "step", "row_step"
GOOD = {"count": 2, "position": 1, "top": 1, "left": 2, "rows": 3, "cols": 2, "offset": 4, "step": 10, "row_step": 3}
HUGE = 2**63 - 1

pytestmark = [pytest.mark.usefixtures("device"), on_every_place(SHIPPED, MODELLED)]
DIRECTIONS = pytest.mark.parametrize("to_buffer", [False, True], ids=["to_matrices", "to_buffer"])


def row(**fields: int) -> list[int]:
    return [{**GOOD, **fields}[name] for name in FIELDS]


def table(*rows: list[int], **options) -> Tensor:
    return torch.tensor(rows, **{"dtype": torch.int64, "device": "cpu", **options})


def arguments(**others) -> dict:
    """Return arguments that fit to the last element: the block of GOOD ends with matrices and buffer."""
    good = {"matrices": torch.ones(3, 4, 4), "buffer": torch.zeros(4 + 10 + 6 + 2), "blocks": table(row())}
    return {**good, **others}


def assert_refuses(op, keywords: dict, to_buffer: bool, message: str) -> None:
    before = {name: value.clone() for name, value in keywords.items()}
    with pytest.raises(RuntimeError, match=message):
        op(**keywords, to_buffer=to_buffer)
    assert all(torch.equal(keywords[name], value) for name, value in before.items())


def test_a_block_may_end_with_both(move_blocks_):
    keywords = arguments()
    move_blocks_(**keywords, to_buffer=True)
    assert keywords["buffer"].sum() == 12 and keywords["buffer"][-1] == 1


BEYOND_MATRICES = {
    "position": {"position": 2},
    "count": {"count": 3, "step": 0},
    "top": {"top": 2},
    "rows": {"rows": 4, "row_step": 0},
    "left": {"left": 3},
    "cols": {"cols": 3},
    "an empty one": {"top": 5, "rows": 0},
    "an endless count": {"count": HUGE},
    "an endless position": {"position": HUGE},
    "endless rows": {"rows": HUGE},
    "an endless left": {"left": HUGE},
}
BEYOND_BUFFER = {
    "offset": {"offset": 5},
    "an element behind the end": {"offset": 22, "count": 1, "rows": 1, "cols": 1},
    "step": {"step": 11},
    "row_step": {"row_step": 4},
    "an endless offset": {"offset": HUGE},
    "an endless step": {"step": HUGE},
    "an endless row_step": {"row_step": HUGE},
    "a row_step that overflows": {"row_step": 2**62},
    "a sum that overflows": {"offset": 4, "step": HUGE - 8, "row_step": 3},
}


@DIRECTIONS
@pytest.mark.parametrize("case", BEYOND_MATRICES)
def test_blocks_beyond_the_matrices_raise_and_nothing_is_written(move_blocks_, case, to_buffer):
    keywords = arguments(blocks=table(row(), row(**BEYOND_MATRICES[case])))
    assert_refuses(move_blocks_, keywords, to_buffer, r"blocks\[1\] = .* is not within matrices of shape \(3, 4, 4\)")


@DIRECTIONS
@pytest.mark.parametrize("case", BEYOND_BUFFER)
def test_blocks_beyond_the_buffer_raise_and_nothing_is_written(move_blocks_, case, to_buffer):
    keywords = arguments(blocks=table(row(), row(**BEYOND_BUFFER[case])))
    assert_refuses(move_blocks_, keywords, to_buffer, r"blocks\[1\] = .* is not within a buffer of 22 elements")


@DIRECTIONS
@pytest.mark.parametrize("field", FIELDS)
def test_negative_fields_raise_and_nothing_is_written(move_blocks_, field, to_buffer):
    for number in -1, -HUGE - 1:
        keywords = arguments(blocks=table(row(), row(**{field: number})))
        assert_refuses(move_blocks_, keywords, to_buffer, r"blocks\[1\] = .* must not be negative")


def bad_arguments() -> dict:
    """Made in a test, on its device."""
    return {
        "must be .B, rows, cols.*, got .4, 4": {"matrices": torch.ones(4, 4)},
        "one dtype, got Float and Double": {"buffer": torch.zeros(22, dtype=torch.float64)},
        "matrices must be float32, float64": {"matrices": torch.ones(3, 4, 4, dtype=torch.int32)},
        "buffer must be float32, float64": {"buffer": torch.zeros(22, dtype=torch.int16)},
        "buffer must be contiguous and 1-D, got shape .22, 1.": {"buffer": torch.zeros(22, 1)},
        "buffer must be contiguous and 1-D, got shape .22.": {"buffer": torch.zeros(44)[::2]},
        "blocks must be Long on the CPU, got Int": {"blocks": table(row(), dtype=torch.int32)},
        "blocks must be .N, 9., contiguous, got shape .9.": {"blocks": table(row())[0]},
        "blocks must be .N, 9., contiguous, got shape .1, 8.": {"blocks": table(row())[:, :8].contiguous()},
        "blocks must be .N, 9., contiguous, got shape .1, 10.": {"blocks": table([*row(), 0])},
        "blocks must be .N, 9., contiguous, got shape .2, 9.": {"blocks": table(row(), row()).T.contiguous().T},
    }


@DIRECTIONS
def test_bad_arguments_raise_and_nothing_is_written(move_blocks_, to_buffer):
    for message, bad in bad_arguments().items():
        assert_refuses(move_blocks_, arguments(**bad), to_buffer, message)


def test_an_endless_size_raises(move_blocks_):
    with pytest.raises(RuntimeError, match=r"each less than 2\^31, got \(1, 1, 2147483648\)"):
        move_blocks_(**arguments(matrices=torch.ones(1).expand(1, 1, 2**31)), to_buffer=True)


def test_more_tiles_than_a_launch_can_have_raise(native, move_blocks_):
    """Of two blocks each has as many as that alone."""
    if native.IS_PORTABLE:
        pytest.skip("it has no tiles")
    many = row(count=2**31 - 1, position=0, top=0, left=0, rows=1, cols=1, offset=0, step=0, row_step=0)
    keywords = arguments(matrices=torch.ones(1).expand(2**31 - 1, 1, 1), blocks=table(many, many))
    with pytest.raises(RuntimeError, match=r"blocks\[1\] and those before it are more than one call can have"):
        move_blocks_(**keywords, to_buffer=True)


def test_what_is_written_overlaps_nothing(move_blocks_):
    memory = torch.zeros(48)
    for to_buffer in False, True:
        shared = arguments(matrices=memory.view(3, 4, 4), buffer=memory[3:25])
        assert_refuses(move_blocks_, shared, to_buffer, "must not share memory")
    expanded = arguments(matrices=torch.ones(1, 4, 4).expand(3, 4, 4))
    assert_refuses(move_blocks_, expanded, False, "matrices is written, so its elements must not overlap")
    move_blocks_(**expanded, to_buffer=True)
    assert expanded["buffer"].sum() == 12


def test_the_buffer_does_not_overlap_the_table(move_blocks_, device):
    if device != "cpu":
        pytest.skip("the table is on the CPU, the buffer is not")
    blocks = table(row())
    shared = arguments(matrices=torch.ones(3, 4, 4).double(), buffer=blocks.view(torch.float64)[0], blocks=blocks)
    assert_refuses(move_blocks_, shared, True, "must not share memory")


def test_tensors_on_two_devices_raise(move_blocks_, device):
    if device == "cpu":
        pytest.skip("there is one device")
    for bad in {"buffer": torch.zeros(22, device="cpu")}, {"matrices": torch.ones(3, 4, 4, device="cpu")}:
        assert_refuses(move_blocks_, arguments(**bad), True, "matrices must be on")
    keywords = arguments(blocks=table(row(), device=device))
    assert_refuses(move_blocks_, keywords, True, "blocks must be Long on the CPU, got Long on device")


@DIRECTIONS
def test_the_operation_keeps_torchs_rules_for_operators(move_blocks_, to_buffer):
    """Schema, fake kernel and tracing under dynamic shapes; there is no gradient to register."""
    utilities = "test_schema", "test_faketensor", "test_aot_dispatch_dynamic"
    keywords = {**arguments(), "to_buffer": to_buffer}
    torch.library.opcheck(move_blocks_.default, (), keywords, test_utils=utilities)


def test_a_compiled_move_is_the_eager_one(move_blocks_):
    def there_and_back(matrices, buffer, blocks):
        move_blocks_(matrices, buffer, blocks, True)
        buffer = buffer * 2
        move_blocks_(matrices, buffer, blocks, False)
        return buffer

    results = []
    for run in there_and_back, torch.compile(there_and_back, fullgraph=True, backend="aot_eager"):
        keywords = arguments()
        results.append([run(**keywords), *keywords.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results))
