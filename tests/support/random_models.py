"""Models of random parameters of every kind, each with its settings and its layout on four ranks."""

from __future__ import annotations

import random
from typing import Any

import torch

from tests.support.sharded_models import LAYOUTS, Case, Layout, Spec

# Layouts of stacks, besides those of matrices.
OF_STACKS = [Layout((4,), ("2",)), Layout((2, 2), ("r", "2")), Layout((2, 2), ("0", "2")), Layout((2, 2), ("1", "2"))]
# The name of a parameter of each kind, and its shape, of two sides and the length of a stack.
KINDS = {
    "layers.{}.up.weight": lambda rows, cols, count: (rows, cols),
    "layers.{}.experts.w1": lambda rows, cols, count: (count, rows, cols),
    "layers.{}.experts.w13": lambda rows, cols, count: (count, 2, rows, cols),
    "layers.{}.conv.weight": lambda rows, cols, count: (rows, count, 3, 3),
    "tok_embeddings.{}.weight": lambda rows, cols, count: (rows, cols),
    "layers.{}.bias": lambda rows, cols, count: (rows,),
}
# A parameter may have two of these.
SETTINGS = [
    {"lr": 0.0},
    {"lr": 0.5, "weight_decay": 0.3},
    {"momentum": 0.0},
    {"nesterov": False, "maximize": True},
    {"eps": 5.0},
    {"ns_steps": 1},
    {"ns_coefficients": "quintic"},
    {"adjust_lr_fn": "original"},
    {"equalize": "rows_columns"},
    {"equalize": "experimental_aurora"},
    {"renormalize": "frobenius"},
    {"renormalize": "columns_rows"},
    {"second_moment": "rows"},
    {"decay_mode": "independent"},
    {"decay_mode": "cautious"},
    {"conv_mode": "batched"},
    {"fallback": "nadamw"},
    {"momentum_dtype": "float32"},
    {"stochastic_rounding": True},
]
# Or one of these, which do not go with all others.
SINGLE_SETTINGS = [
    {"ns_method": "gram", "ns_dtype": "float32"},
    {"ns_method": "gram_float32"},
    {"decay_mode": "corrected"},
    {"second_moment": "long_side"},
    {"momentum_dtype": "int8"},
    {"master_weights": "split"},
    {"experimental_hyperball": True},
    {"transposed": True},
]
OF_RANKS = {
    "chunk_bytes": [200, 300, 2000],
    "chunks_in_flight": [1, 2, 5],
    "ranks_per_matrix": [1, 2, 4],
    "release_grads": [True],
}


def random_case(seed: int) -> Case:
    """Return a model of three to eight parameters, of which about half have a group to themselves."""
    draw = random.Random(seed)
    dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64])
    specs = tuple(_spec(draw, number, dtype) for number in range(draw.randint(3, 8)))
    settings = {"lr": 0.02, "expert_keys": ("experts",)}
    if dtype != torch.float64:
        settings["ns_dtype"] = draw.choice(["float32", "bfloat16"])
    settings |= {key: draw.choice(values) for key, values in OF_RANKS.items() if draw.random() < 0.4}
    # Where a parameter is several matrices, a rank that has no gradient may be the only one of some.
    missing = ["nowhere", "everywhere", *(["here and there"] if all(map(_is_one_matrix, specs)) else [])]
    return Case(
        specs,
        settings,
        steps=4,
        seed=seed,
        dtype=dtype,
        missing=draw.choice(missing),
        zero=tuple(draw.sample(range(len(specs)), draw.randint(0, 1))),
        spoiled=draw.choice([None, None, *range(len(specs))]),
        shared=draw.random() < 0.3,
        gradient_dtype=draw.choice([None, torch.float32]),
    )


def laid_out_anew(case: Case) -> Case:
    """Return the same model in other layouts; its plain copies may be shared where they were not, or the other way."""
    draw = random.Random(case.seed)
    specs = tuple(spec._replace(layout=_layout(draw, spec)) for spec in case.specs)
    return case._replace(specs=specs, shared=draw.random() < 0.3)


def _spec(draw: random.Random, number: int, dtype: torch.dtype) -> Spec:
    name, shape_of = draw.choice([*KINDS.items(), *list(KINDS.items())[:1] * 3])
    rows, cols = (draw.choice([1, 2, 3, 16, 32, draw.randint(4, 40)]) for _ in range(2))
    shape = shape_of(rows, cols, draw.randint(1, 6))
    spec = Spec(name.format(number), shape, None, _group(draw, name, shape, dtype))
    return spec._replace(layout=_layout(draw, spec))


def _group(draw: random.Random, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    if draw.random() < 0.5:
        return {}
    if draw.random() < 0.6:
        return {key: value for some in draw.sample(SETTINGS, 2) for key, value in some.items()}
    settings = draw.choice(SINGLE_SETTINGS)
    fits = {"experimental_hyperball": dtype != torch.bfloat16, "transposed": "conv" not in name}
    if not all(fits.get(key, True) for key in settings):
        return {}
    if "transposed" in settings and len(shape) > 1 and shape[-1] > 1:
        cut = draw.randrange(1, shape[-1])
        return {**settings, "split_rows": (cut, shape[-1] - cut)}
    return settings


def _layout(draw: random.Random, spec: Spec) -> Layout | None:
    """Return a layout that goes with the kind and the settings of a parameter; None for a plain copy on each rank."""
    dims = {str(dim) for dim in range(len(spec.shape))}
    if "conv" in spec.name:
        dims = {"0"}
    elif "w13" in spec.name:
        dims.remove("1")
    if spec.group.get("momentum_dtype") == "int8":  # a scale for each 64 neighbours
        dims.discard(str(len(spec.shape) - 1))
    layouts = [*LAYOUTS.values(), *OF_STACKS]
    return draw.choice([None, *(each for each in layouts if {split[0] for split in each.splits} <= dims | {"r"})])


def _is_one_matrix(spec: Spec) -> bool:
    return "up.weight" in spec.name and "split_rows" not in spec.group
