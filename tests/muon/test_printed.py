"""How the optimizer writes names that are alike, and itself."""

import importlib
import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter


@pytest.fixture(scope="module")
def writing(kernel):
    return importlib.import_module(".explain.writing", kernel.__name__)


@pytest.fixture(scope="module")
def table(kernel):
    return importlib.import_module(".explain.table", kernel.__name__)


def values_of(braces: str) -> list[str]:
    """The numbers of `{0..3,7}` or `{0..6..2}`, as a shell would read the braces."""
    numbers = []
    for part in braces.split(","):
        first, last, step = re.fullmatch(r"(\d+)(?:\.\.(\d+))?(?:\.\.(\d+))?", part).groups()
        numbers += range(int(first), int(last or first) + 1, int(step or 1))
    return list(map(str, numbers))


def expanded(name: str) -> list[str]:
    """Every name that a joined one stands for."""
    parts = re.split(r"\{([^}]*)\}", name)
    choices = [values_of(part) if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(choice) for choice in itertools.product(*choices)]


NUMBERS = st.tuples(st.integers(0, 12), st.integers(0, 4), st.integers(1, 2))


@settings(deadline=None, derandomize=True)
@given(st.sets(NUMBERS, min_size=1))
def test_joined_names_stand_for_exactly_the_names(writing, numbers):
    names = ["layers.{}.experts.{}.w{}".format(*each) for each in numbers]
    joined = writing.joined_names(names)
    assert sorted(name for joint, _ in joined for name in expanded(joint)) == sorted(names)
    assert all(sorted(expanded(joint)) == sorted(names[i] for i in places) for joint, places in joined)
    assert all(places[0] == min(places) for _, places in joined)


@pytest.mark.parametrize(
    "names, joined",
    [
        ([f"layers.{i}.up" for i in range(24)], ["layers.{0..23}.up"]),
        ([f"layers.{i}.experts.{j}.up" for i in range(3) for j in range(8)], ["layers.{0..2}.experts.{0..7}.up"]),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0"], ["a.0.b.{0,1}", "a.1.b.0"]),
        ([f"layers.{i}.up" for i in (1, 3, 5, 7)], ["layers.{1..7..2}.up"]),
        ([f"layers.{i}.up" for i in (0, 1, 2, 5, 8, 9)], ["layers.{0..2,5,8,9}.up"]),
        ([f"param_{i}" for i in range(4)], ["param_{0..3}"]),
        (["mlp.w1", "mlp.w2", "layer1.up", "layer2.up"], ["mlp.w1", "mlp.w2", "layer1.up", "layer2.up"]),
        (["a.00.up", "a.0.up", "a.1.up"], ["a.00.up", "a.{0,1}.up"]),
    ],
)
def test_only_numbers_that_are_words_are_joined(writing, names, joined):
    assert [name for name, _ in writing.joined_names(names)] == joined


@pytest.mark.parametrize(
    "flops, text",
    [
        (7, "7 FLOP"),
        (999, "999 FLOP"),
        (999_499, "999 kFLOP"),
        (999_500, "1 MFLOP"),
        (1.25e15, "1.25 PFLOP"),
        (2.5e18, "2.5 EFLOP"),
    ],
)
def test_flops_have_three_digits_and_no_exponent(writing, flops, text):
    assert writing.flops_text(flops) == text


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**51, "2048.0 TiB"),
    ],
)
def test_bytes_have_the_unit_that_their_rounded_number_needs(writing, count, text):
    assert writing.bytes_text(count) == text


def test_the_optimizer_prints_in_a_few_lines(kernel):
    groups = [{"params": [(f"{i}.up.weight", Parameter(torch.zeros(8, 8)))], "lr": 0.5 + i} for i in range(100)]
    lines = repr(kernel.Muon(groups, ns_steps=6, ns_dtype="float32", qk_clip=None)).splitlines()
    assert lines[:2] == ["Muon: 100 parameters by Muon", "  settings: ns_steps=6, ns_dtype=float32"]
    assert lines[2] == "  group 0: 1 parameter by Muon, lr=0.5, weight_decay=0.1"
    assert len(lines) == 2 + 16 and lines[-1] == "  and 85 more lines: see param_groups"
    lines = repr(kernel.Muon(groups[:16])).splitlines()
    assert len(lines) == 1 + 16 and lines[-1].startswith("  group 15: ")


def test_a_long_list_of_groups_is_counted(kernel):
    """Those that look the same share a line; a short list names each."""
    groups = [
        {"params": [(f"{i}.up.weight", Parameter(torch.zeros(8, 8)))], "lr": 0.25 if i % 5 in (1, 3) else 0.5}
        for i in range(23)
    ]
    for count, named in ((23, "14 groups from group 0 on, each"), (8, "group {0,2,4,5,7}")):
        lines = repr(kernel.Muon(groups[:count])).splitlines()
        assert f"  {named}: 1 parameter by Muon, lr=0.5, weight_decay=0.1" in lines and len(lines) == 3


def test_groups_print_what_is_their_own(kernel):
    up, down, bias = (Parameter(torch.zeros(shape)) for shape in ((8, 8), (8, 8), (8,)))
    groups = [
        {"params": [("up", up), ("bias", bias)], "lr": 0.5, "adamw_lr": 0.25, "role": "mlp"},
        {"params": [("down", down)], "weight_decay": 0.0, "nesterov": False},
    ]
    exchange = kernel.ExchangeOptions(chunks_in_flight=1)
    assert repr(kernel.Muon(groups, fallback="nadamw", exchange=exchange)).splitlines() == [
        "Muon: 2 parameters by Muon, 1 parameter by NAdamW",
        f"  settings: exchange={exchange}",
        "  group 0: 1 parameter by Muon, lr=0.5, weight_decay=0.1, role=mlp",
        "  group 1: 1 parameter by NAdamW, lr=0.5, weight_decay=0.1, role=mlp, lr_factor=0.5",
        "  group 2: 1 parameter by Muon, lr=0.001, weight_decay=0, nesterov=False",
    ]


def test_settings_are_printed_as_a_user_writes_them(kernel):
    """Numbers of tensors, the names of functions; and rates of AdamW's only in the lines of its groups."""

    def halved(rows, cols):
        return 0.5

    shapes = {"up": (8, 8), "down": (8, 8), "bias": (8,)}
    params = [(name, Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
    rates = {"lr": torch.tensor(0.5), "adamw_lr": 0.25, "adamw_weight_decay": 0.25}
    assert repr(kernel.Muon(params, adjust_lr_fn=halved, **rates)).splitlines() == [
        "Muon: 2 parameters by Muon, 1 parameter by AdamW",
        "  settings: adjust_lr_fn=halved",
        "  group 0: 2 parameters by Muon, lr=0.5, weight_decay=0.1",
        "  group 1: 1 parameter by AdamW, lr=0.5, weight_decay=0.25, lr_factor=0.5",
    ]


@pytest.mark.parametrize("fallback", ["adamw", "nadamw"])
def test_the_table_names_torchs_function_that_a_fallback_calls(kernel, fallback):
    (row,) = kernel.Muon([("bias", Parameter(torch.zeros(8)))], fallback=fallback).explain()
    assert (row.branch, row.kernel) == (fallback, "torch._fused_adamw_")


def test_the_table_has_all_rows_in_their_order_and_sums_them(table):
    """Also a scalar, owner 0, matrices without work, and parameters of both fallbacks."""
    matrix = table.Route("a.up", (2, 3, 4), "muon", "matrix", 2, (0.123456,), 0, "gemm", 0.0123456, 0.1, 4, 0.0)
    scale = table.Route("scale", (), "nadamw", "scalar", kernel="nadamw", lr=1.0, weight_decay=0.0, state_bytes=8)
    bias = scale._replace(name="bias", shape=(8,), branch="adamw")
    lines = str(table.Explanation([matrix, scale, matrix._replace(name="b.up"), bias])).splitlines()
    rows = [line.split() for line in lines[2:6]]
    first = ["a.up", "2x3x4", "muon", "matrix", "2", "0.1235", "0.01235", "0.1", "4", "B", "0", "[1]"]
    assert [row[:2] for row in rows] == [first[:2], ["scale", "scalar"], ["b.up", "2x3x4"], ["bias", "8"]]
    assert rows[0] == first and lines[-1] == (
        "2 parameters (48 elements, 8 B of state) by Muon, 2 (9 elements, 16 B of state) by AdamW and NAdamW"
    )


def test_a_sum_of_state_is_said_only_where_all_of_it_is_known(table):
    known = table.Route("a", (2, 3), "muon", "matrix", 1, (1.0,), state_bytes=24)
    lines = str(table.Explanation([known, known._replace(name="b", state_bytes=None)])).splitlines()
    assert lines[-1].startswith("2 parameters (12 elements) by Muon")
    assert (
        str(table.Explanation([known])).splitlines()[-1].startswith("1 parameter (6 elements, 24 B of state) by Muon")
    )
    assert str(table.Explanation([])).splitlines()[-1].startswith("0 parameters (0 elements) by Muon")


def test_two_numbers_are_listed(writing):
    assert writing.number_set([0, 5]) == "{0,5}"
