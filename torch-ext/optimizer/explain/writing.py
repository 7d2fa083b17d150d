"""Formatting of numbers: in names that differ only by numbers, of bytes and FLOPs, and of settings."""

from __future__ import annotations

import re
from typing import Any, Hashable, Iterable, Mapping, Sequence, Union

from torch import Tensor

from ..parameters.setting_values import number_at_hand

# A number that is a separate word of a name, as in `layers.0.up` and `param_0`; not the digit in `w1` or `conv2`.
_NUMBER = re.compile(r"(?<![A-Za-z0-9])(?:0|[1-9][0-9]*)(?![A-Za-z0-9])")

# The set of values of each number in a name, independent of the others.
Box = tuple[frozenset[int], ...]


def joined_names(names: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return joined names and the positions of the names in each; names that differ only in numbers are joined.

    `layers.{0..2}.up` means three names, `{0..6..2}` every second number, `{0,5..7}` four. The first position of each
    is that of the first name.
    """
    by_words: dict[Hashable, dict[Box, list[int]]] = {}
    for position, name in enumerate(names):
        numbers = tuple(frozenset([int(number)]) for number in _NUMBER.findall(name))
        by_words.setdefault(tuple(_NUMBER.split(name)), {}).setdefault(numbers, []).append(position)
    return [
        (_name(words, box), positions) for words, boxes in by_words.items() for box, positions in _joined(boxes).items()
    ]


def _joined(boxes: dict[Box, list[int]]) -> dict[Box, list[int]]:
    """Return fewer boxes with the same content: boxes that differ in one number only are joined, last number first.

    For example (0, 0), (0, 1), (1, 0) and (1, 1) become (0, {0, 1}) and (1, {0, 1}), and then ({0, 1}, {0, 1}).
    """
    for slot in reversed(range(len(next(iter(boxes))))):
        alike: dict[Box, list[tuple[Box, list[int]]]] = {}
        for box, positions in boxes.items():
            alike.setdefault((*box[:slot], *box[slot + 1 :]), []).append((box, positions))
        boxes = {}
        for members in alike.values():
            first = members[0][0]
            values = frozenset().union(*(box[slot] for box, _ in members))
            joined_positions = [position for _, positions in members for position in positions]
            boxes[(*first[:slot], values, *first[slot + 1 :])] = joined_positions
    return boxes


def _name(words: Sequence[str], box: Box) -> str:
    return "".join(part for pair in zip(words, [*map(number_set, box), ""]) for part in pair)


def number_set(numbers: Iterable[int]) -> str:
    """Return whole numbers in the notation of shell braces: `7`, `{0..3}`, `{0..6..2}`, `{0,5..7}`."""
    ordered = sorted(numbers)
    if len(ordered) == 1:
        return str(ordered[0])
    step = ordered[1] - ordered[0]
    if len(ordered) > 2 and step > 1 and ordered == list(range(ordered[0], ordered[-1] + 1, step)):
        return f"{{{ordered[0]}..{ordered[-1]}..{step}}}"
    starts = [i for i, number in enumerate(ordered) if i == 0 or number != ordered[i - 1] + 1]
    return f"{{{','.join(map(_run, (ordered[i:j] for i, j in zip(starts, [*starts[1:], len(ordered)]))))}}}"


def _run(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}..{numbers[-1]}" if len(numbers) > 2 else ",".join(map(str, numbers))


def bytes_text(count: int) -> str:
    """Return bytes to a tenth, in the first of B, KiB, MiB, GiB, TiB in which the number is below 1024."""
    power = next(power for power in range(5) if round(count / 1024**power, 1) < 1024 or power == 4)
    return f"{count} B" if power == 0 else f"{count / 2 ** (10 * power):.1f} {'KMGT'[power - 1]}iB"


def flops_text(flops: float) -> str:
    """Return FLOPs to three digits, in the largest of thousands, millions and so on."""
    rounded = float(f"{flops:.3g}")  # first: 999,600 are 1 MFLOP
    power = min((len(str(int(rounded))) - 1) // 3, 6)
    return f"{rounded / 1000**power:.3g} {['', *'kMGTPE'][power]}FLOP"


def shown_number(value: Union[float, Tensor]) -> Union[float, str]:
    """Return the current value of a group's number; for a tensor whose number is not at hand only its device."""
    number = number_at_hand(value)
    return f"tensor on {number.device}" if isinstance(number, Tensor) else number


def effective_lr(group: Mapping[str, Any]) -> Union[float, str]:
    """Return the current learning rate of a group's parameters, or a text with the device of a tensor."""
    rate, factor = shown_number(group["lr"]), group["lr_factor"]
    if isinstance(rate, str):
        return rate if factor == 1.0 else f"{factor:g} x {rate}"
    return rate * factor
