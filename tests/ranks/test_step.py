"""However parameters lie on ranks, steps give the bits that one process gets that has them whole."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.backends import on_every_backend
from tests.support.pairwise import in_turn, pairwise
from tests.support.sharded_models import LAYOUTS, Case, Layout, Spec, assert_as_alone, model

WORK = ["float32", *(["bfloat16"] if torch.cpu._is_avx512_bf16_supported() else [])]
FACTORS = {
    "layout": list(LAYOUTS),
    "dtype": [torch.float32, torch.bfloat16],
    "work": WORK,
    "missing": ["nowhere", "everywhere", "here and there", "all but one"],
    "chunk_bytes": [None, 300, 3000],
    "chunks_in_flight": [1, 2, 5],
    "decay_mode": ["decoupled", "independent", "cautious"],
    "momentum": [{}, {"nesterov": False, "maximize": True}, {"momentum_dtype": "bfloat16"}],
    "release_grads": [False, True],
    "recipe": [
        {},
        {"equalize": "rows", "renormalize": "columns_rows"},
        {"equalize": "columns", "renormalize": "frobenius", "sum_gram": True},
        {"second_moment": "rows"},
        {"second_moment": "long_side", "sum_gram": True},
        {"equalize": "experimental_aurora"},
        {"master_weights": "split", "second_moment": "rows"},
    ],
}
ROWS = pairwise(FACTORS, seed=0)
TWO = [Layout((2,), ("0",)), Layout((2,), ("1",)), Layout((2,), ("r",))]
THREE = [Layout((3,), ("0",)), Layout((3,), ("1",)), Layout((1, 3), ("r", "0"))]
EIGHT = [
    Layout((2, 2, 2), ("r", "0/2", "0")),
    Layout((2, 2, 2), ("r", "0", "1")),
    Layout((2, 2, 2), ("0", "r", "1")),
    Layout((2, 4), ("1/4", "1")),
    Layout((4, 2), ("r", "0")),
    Layout((8,), ("0",)),
]
EXPERTS = [
    Layout((4,), ("0",)),
    Layout((4,), ("1",)),
    Layout((4,), ("2",)),
    Layout((2, 2), ("0", "1")),
    Layout((2, 2), ("0", "2")),
    Layout((2, 2), ("0", "0")),
    Layout((2, 2), ("r", "0")),
    Layout((2, 2), ("0", "r")),
    Layout((2, 2), ("1", "2")),
]


@on_every_backend()
@pytest.mark.parametrize("number", range(len(ROWS)), ids=lambda i: f"{i} {ROWS[i]['layout']}")
def test_every_layout_gives_the_bits_of_one_process(kernel, pools, number):
    row = ROWS[number]
    settings = {key: row[key] for key in ("chunk_bytes", "chunks_in_flight", "decay_mode")}
    settings |= {"ns_dtype": row["work"], "lr": 0.02, "release_grads": row["release_grads"]}
    settings |= {**row["momentum"], **row["recipe"]}
    specs = model(LAYOUTS[row["layout"]], seed=number)
    # Six steps: with four some gradients that are missing on all holders but one come at no step that shows it.
    steps = 3 if row["missing"] == "nowhere" else 6
    case = Case(specs, settings, steps=steps, seed=number, dtype=row["dtype"], missing=row["missing"])
    assert_as_alone(kernel, pools, case)


@on_every_backend()
@pytest.mark.parametrize("name, work", in_turn(LAYOUTS, WORK))
def test_kept_norms_give_the_bits_of_one_process(kernel, pools, name, work):
    settings = {"experimental_hyperball": True, "second_moment": "rows", "ns_dtype": work, "chunk_bytes": 1000}
    assert_as_alone(kernel, pools, Case(model(LAYOUTS[name], seed=3), settings, seed=3, missing="here and there"))


@on_every_backend()
@pytest.mark.parametrize("name", ["hsdp", "replicated within"])
def test_kept_norms_of_copies_that_share_the_work_give_the_bits_of_one_process(kernel, pools, name):
    """One copy sends its matrices to their owners, and all get new ones."""
    specs = tuple(Spec(f"blocks.{i}.up.weight", (96, 64), LAYOUTS[name]) for i in range(4))
    assert_as_alone(kernel, pools, Case(specs, {"experimental_hyperball": True, "ns_dtype": "float32"}, steps=3))


@on_every_backend()
@pytest.mark.parametrize("seed", range(6))
def test_mixed_layouts_give_the_bits_of_one_process(kernel, pools, seed):
    draw = random.Random(seed)
    pairs = enumerate(model(None, seed))
    specs = [Spec(f"blocks.{i}.up.weight", spec.shape, draw.choice([None, *LAYOUTS.values()])) for i, spec in pairs]
    settings = {"ns_dtype": draw.choice(WORK), "chunk_bytes": draw.choice([200, 2000, None])}
    missing = draw.choice(["nowhere", "everywhere", "here and there"])
    settings["eps"] = 5.0 if seed % 2 else 1e-7  # above the norms of most directions, and below all
    assert_as_alone(kernel, pools, Case(tuple(specs), settings, seed=seed, missing=missing))


@on_every_backend(2)
@pytest.mark.parametrize("layout", TWO, ids=str)
def test_two_ranks_give_the_bits_of_one_process(kernel, pools, layout):
    assert_as_alone(
        kernel, pools, Case(model(layout, seed=1), {"chunk_bytes": 1000}, missing="here and there"), ranks=2
    )


@on_every_backend(8)
@pytest.mark.slow
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("layout", THREE + EIGHT, ids=str)
def test_three_and_eight_ranks_give_the_bits_of_one_process(kernel, pools, layout, work):
    case = Case(model(layout, seed=2), {"chunk_bytes": 1000, "ns_dtype": work}, missing="here and there")
    assert_as_alone(kernel, pools, case, ranks=3 if 3 in layout.mesh else 8)


@on_every_backend()
@pytest.mark.parametrize("layout", EXPERTS, ids=str)
@pytest.mark.parametrize("count", [5, 2], ids=["more experts than ranks", "fewer"])
def test_experts_give_the_bits_of_one_process(kernel, pools, layout, count):
    shapes = [("w1", (count, 12, 7)), ("w2", (count, 7, 12)), ("w3", (count, 1, 9))]
    specs = tuple(Spec(f"layers.0.experts.{name}", shape, layout) for name, shape in shapes)
    settings = {"expert_keys": ("experts",), "chunk_bytes": 500}
    assert_as_alone(kernel, pools, Case(specs, settings, steps=6, missing="everywhere"))


STACKS_IN_STACKS = [("0",), ("2",), ("3",), ("0", "2"), ("0", "3"), ("2", "3"), ("r", "0")]


@on_every_backend()
@pytest.mark.parametrize("splits", STACKS_IN_STACKS, ids=str)
@pytest.mark.parametrize("count", [5, 2], ids=["more experts than ranks", "fewer"])
def test_gates_beside_ups_of_experts_give_the_bits_of_one_process(kernel, pools, splits, count):
    layout = Layout((4,) if len(splits) == 1 else (2, 2), splits)
    specs = (
        Spec("layers.0.experts.w13", (count, 2, 12, 7), layout),
        Spec("layers.1.experts.w13", (count, 2, 7, 12), layout, {"transposed": True, "split_rows": (5, 7)}),
    )
    settings = {"expert_keys": ("experts",), "chunk_bytes": 500}
    assert_as_alone(kernel, pools, Case(specs, settings, steps=6, missing="everywhere"))


@on_every_backend()
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_fused_rows_give_the_bits_of_one_process(kernel, pools, layout):
    specs = (
        Spec("wqkv.weight", (22, 9), layout, {"split_rows": (10, 6, 6)}),
        Spec("gate_up.weight", (14, 20), layout, {"split_rows": (7, 7)}),
        Spec("heads.weight", (16, 11), layout, {"split_rows": (2,) * 8}),
    )
    assert_as_alone(kernel, pools, Case(specs, {"chunk_bytes": 700}, steps=6, missing="everywhere"))


@on_every_backend()
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_transposed_weights_give_the_bits_of_one_process(kernel, pools, layout):
    specs = (
        Spec("c_attn.weight", (9, 22), layout, {"transposed": True, "split_rows": (10, 6, 6)}),
        Spec("c_proj.weight", (20, 14), layout, {"transposed": True}),
        Spec("experts.gate_up", (5, 9, 14), layout, {"transposed": True, "split_rows": (7, 7)}),
    )
    assert_as_alone(kernel, pools, Case(specs, {"chunk_bytes": 700}, steps=6, missing="everywhere"))


@on_every_backend()
@pytest.mark.parametrize("conv_mode", ["flatten", "batched"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_convolutions_give_the_bits_of_one_process(kernel, pools, layout, conv_mode):
    shapes = {"a.conv.weight": (9, 5, 3, 3), "b.conv.weight": (3, 8, 5), "c.conv.weight": (7, 2, 2, 3, 2)}
    specs = tuple(Spec(name, shape, layout) for name, shape in shapes.items())
    assert_as_alone(kernel, pools, Case(specs, {"conv_mode": conv_mode, "chunk_bytes": 700}, steps=3))


@on_every_backend()
@pytest.mark.parametrize("layout", [None, LAYOUTS["replicated"], LAYOUTS["hsdp"]], ids=["plain", "replicated", "hsdp"])
def test_shared_large_copies_give_the_bits_of_one_process(kernel, pools, layout):
    # 384 x 400 costs 3.5e8 FLOPs a step of the iteration, over the 2**28 from which copies are worth sending.
    specs = tuple(Spec(f"layers.{i}.up.weight", (384, 400), layout) for i in range(10, 13)) + model(layout, seed=3)
    assert_as_alone(kernel, pools, Case(specs, {"ns_steps": 2}, steps=4, missing="everywhere", shared=layout is None))


@on_every_backend()
@pytest.mark.parametrize("ranks", [2, 4])
def test_plain_copies_give_the_bits_of_one_process(kernel, pools, ranks):
    case = Case(model(None, seed=4), {"chunk_bytes": 500}, steps=6, missing="everywhere", shared=True)
    assert_as_alone(kernel, pools, case, ranks)


@on_every_backend()
@pytest.mark.parametrize("fallback", ["adamw", "nadamw"])
@pytest.mark.parametrize("layout", ["rows", "columns", "hsdp", "strided rows"])
def test_fallback_parameters_give_the_bits_of_one_process(kernel, pools, layout, fallback):
    layout = LAYOUTS[layout]
    vector = layout if "1" not in layout.splits else LAYOUTS["rows"]
    specs = (
        Spec("tok_embeddings.weight", (37, 5), layout),
        Spec("up.bias", (29,), vector),
        Spec("b.bias", (2,), vector),
    )
    case = Case(specs, {"lr": 0.02, "fallback": fallback}, steps=6, missing="everywhere")
    assert_as_alone(kernel, pools, case)


@on_every_backend()
@pytest.mark.parametrize("name, missing", in_turn(LAYOUTS, FACTORS["missing"]))
def test_stochastic_rounding_gives_the_bits_of_one_process(kernel, pools, name, missing):
    settings = {"stochastic_rounding": True, "chunk_bytes": 1000, "lr": 0.02}
    case = Case(model(LAYOUTS[name], seed=8), settings, steps=6, dtype=torch.bfloat16, missing=missing)
    assert_as_alone(kernel, pools, case)
