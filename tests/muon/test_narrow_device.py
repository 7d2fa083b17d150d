"""Steps on devices without float64: every recipe trains there, and comes as close to float64 as float32 allows.

Both runs are on the modelled device, which refuses every tensor of float64 unless it says that it has it. So the
products are the same, and only norms and numbers differ.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.narrow_device import KINDS, NarrowDevice, narrow_device

pytestmark = pytest.mark.usefixtures("one_thread")

UNIT = torch.finfo(torch.float32).eps / 2
STEPS, LR = 2, 0.02
MATRICES = {"wide.weight": (24, 40), "tall.weight": (40, 24), "experts.w": (2, 16, 16), "conv.weight": (8, 4, 3, 3)}
SHAPES = {**MATRICES, "norm.weight": (33,), "norm.bias": (32,)}

# The largest product of the first coefficients of Polar Express, by which roundings grow in the iteration.
AMPLIFICATION = 500
# A norm's, and those of products as long as a matrix, relative to the largest entries.
ROUNDINGS = 14 + 40
# What updates, whose entries are at most 1.2, are multiplied by. It is most in Hyperball: a norm over an update's.
MULTIPLIER = 8

RECIPES: dict[str, dict[str, Any]] = {
    "the default": {},
    "without Nesterov, maximizing": {"nesterov": False, "maximize": True},
    "independent decay": {"decay_mode": "independent"},
    "cautious decay": {"decay_mode": "cautious"},
    "corrected decay": {"decay_mode": "corrected"},
    "NAdamW": {"fallback": "nadamw", "weight_decay": 0.3},
    "NAdamW, cautious": {"fallback": "nadamw", "decay_mode": "cautious", "maximize": True},
    "NAdamW without averages": {"fallback": "nadamw", "adamw_betas": (0.0, 0.0)},
    "rows equalized": {"equalize": "rows"},
    "rows and columns equalized": {"equalize": "rows_columns", "renormalize": "columns_rows"},
    "Aurora": {"equalize": "experimental_aurora"},
    "renormalized": {"renormalize": "frobenius"},
    "second moments of rows": {"second_moment": "rows"},
    "second moments of the long side": {"second_moment": "long_side", "renormalize": "frobenius"},
    "Hyperball": {"experimental_hyperball": True},
    "batched convolutions": {"conv_mode": "batched"},
    "momentum in 8 bits": {"momentum_dtype": "int8"},
    "momentum in bfloat16": {"momentum_dtype": "bfloat16"},
    "offloaded momentum": {"offload": True},
    "released gradients": {"release_grads": True},
    "the Gram iteration": {"ns_method": "gram_float32"},
}
IN_BFLOAT16: dict[str, dict[str, Any]] = {
    "rounded": {},
    "rounded stochastically": {"stochastic_rounding": True},
    "second moments": {"second_moment": "rows"},
    "master weights": {"master_weights": "split"},
    "master weights, NAdamW": {"master_weights": "split", "fallback": "nadamw"},
}


def drawn(device: torch.device, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(device, dtype) for name, shape in SHAPES.items()}


class Run:
    """Some steps on the modelled device; what they leave is on the CPU, in float64."""

    def __init__(self, kernel: ModuleType, narrow: NarrowDevice, dtype: torch.dtype, settings: Mapping[str, Any]):
        self.parameters = drawn(narrow.device, dtype, 0)
        numbers = {name: value(narrow.device) if callable(value) else value for name, value in settings.items()}
        self.optimizer = kernel.Muon(self.parameters.items(), **{"lr": LR, **numbers})
        for step in range(1, STEPS + 1):
            before = narrow.waits
            for name, gradient in drawn(narrow.device, dtype, step).items():
                self.parameters[name].grad = gradient
            self.optimizer.step()
            self.waits = narrow.waits - before
        masters = self.optimizer.master_weights()
        self.end = {name: masters.get(name, p).cpu().double() for name, p in self.parameters.items()}
        state = {name: self.optimizer.state[p] for name, p in self.parameters.items()}
        kept = {f"{key} of {name}": t for name, values in state.items() for key, t in values.items()}
        self.state = {name: t.cpu() for name, t in kept.items()}
        self.metrics = {name: value.item() for name, value in self.optimizer.metrics().items()}


@pytest.fixture(scope="module")
def run(portable_kernel):
    """Steps with these settings on a device of a kind, or, with None, on one that has float64."""

    @functools.cache
    def run(kind: str | None, settings: tuple[tuple[str, Any], ...], dtype: torch.dtype) -> Run:
        with narrow_device(portable_kernel, kind or "xpu", has_float64=kind is None) as narrow:
            return Run(portable_kernel, narrow, dtype, dict(settings))

    return lambda kind, settings, dtype=torch.float32: run(kind, tuple(settings.items()), dtype)


def allowed(name: str, value: Tensor) -> Tensor | float:
    """Return how far a parameter may be from that of a device with float64, which has the same momentum.

    Matrices: by the roundings of their norms, grown in the iteration. The others: by that of lr * weight_decay and of
    the corrections, a few at each step, relative to the parameter and to its step, which is below 10 lr.
    """
    if name in MATRICES:
        return STEPS * LR * MULTIPLIER * AMPLIFICATION * ROUNDINGS * UNIT
    return STEPS * 8 * UNIT * (value.abs() + 10 * LR)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_makes_no_tensor_of_float64(run, kind, recipe):
    """It neither waits for the device, nor moves parameters elsewhere than float64 would."""
    narrow, wide = run(kind, RECIPES[recipe]), run(None, RECIPES[recipe])
    assert narrow.waits == 0
    for name, value in wide.end.items():
        assert ((narrow.end[name] - value).abs() <= allowed(name, value)).all(), name
    momentum = [name for name in wide.state if name.startswith("momentum")]
    assert len(momentum) >= len(MATRICES)
    assert all(torch.equal(narrow.state[name], wide.state[name]) for name in momentum)
    assert narrow.metrics == pytest.approx(wide.metrics, rel=1e-4)
    assert min(narrow.metrics.values()) == narrow.metrics["matrices_not_finite"] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", IN_BFLOAT16)
def test_parameters_in_bfloat16_are_at_most_their_roundings_apart(run, kind, recipe):
    """Each step rounds once, and what is a millionth apart seldom rounds to two neighbours.

    Master weights round to float32, and come as close as float32 parameters.
    """
    settings = IN_BFLOAT16[recipe]
    narrow, wide = (run(each, settings, torch.bfloat16) for each in (kind, None))
    for name, value in wide.end.items():
        error = (narrow.end[name] - value).abs()
        spacing = 0.0 if "master_weights" in settings else STEPS * 2.0**-7 * value.abs()
        assert (error <= allowed(name, value) + spacing).all(), name
        assert "master_weights" in settings or (error > 0).double().mean() <= 0.02, name
    assert narrow.metrics == pytest.approx(wide.metrics, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_iterations_in_half_precision_err_no_more(run, kind, dtype):
    """A norm's last digit decides how entries are rounded: errors differ, and are as large, against float32."""
    exact, narrow, wide = (run(each, {"ns_dtype": of}).end for each, of in ((None, None), (kind, dtype), (None, dtype)))
    for name in MATRICES:
        ours, theirs = ((each[name] - exact[name]).norm() for each in (narrow, wide))
        assert 0 < ours <= 1.5 * theirs, name


NUMBERS = {
    "float64 on the CPU": lambda value, device: torch.tensor(value, dtype=torch.float64),
    "float32 on the CPU": lambda value, device: torch.tensor(value),
    "float32 on the device": lambda value, device: torch.tensor(value).to(device),
}
MODES = ["decoupled", "independent", "cautious", "corrected"]


@pytest.mark.parametrize("number, kinds", list(enumerate(itertools.product(NUMBERS, NUMBERS))), ids=str)
@pytest.mark.parametrize("fallback", ["adamw", "nadamw"])
def test_numbers_in_tensors_are_read_wherever_they_are(run, number, kinds, fallback):
    """As numbers of Python are: all pairs of kinds, and each mode of decay with at least two of them.

    The decay has a dimension: torch multiplies numbers without one wherever they are.
    """
    lr, decay = (functools.partial(NUMBERS[kind], value) for kind, value in zip(kinds, (LR, [0.1])))
    settings = {"decay_mode": MODES[number % 4], "fallback": fallback}
    narrow = run("mps", {"lr": lr, "weight_decay": decay, **settings})
    wide = run(None, {"lr": LR, "weight_decay": 0.1, **settings})
    for name, value in wide.end.items():
        assert ((narrow.end[name] - value).abs() <= allowed(name, value)).all(), name
    assert narrow.metrics == pytest.approx(wide.metrics, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize("fallback", ["adamw", "nadamw"])
def test_scaled_gradients(portable_kernel, monkeypatch, kind, overflows, fallback):
    """What GradScaler sets: the factor of gradients, and whether they overflowed. torch's MPS kernel ignores both."""
    ignoring = {"grad_scale": None, "found_inf": None} if kind == "mps" else {}
    kernel = torch._fused_adamw_
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *lists, **numbers: kernel(*lists, **{**numbers, **ignoring}))
    with narrow_device(portable_kernel, kind) as narrow:
        parameters = drawn(narrow.device, torch.float32, 0)
        optimizer = portable_kernel.Muon(parameters.items(), fallback=fallback)
        for name, gradient in drawn(narrow.device, torch.float32, 1).items():
            parameters[name].grad = gradient * 8.0
        optimizer.grad_scale = torch.full((), 8.0, device=narrow.device)
        optimizer.found_inf = torch.full((1,), float(overflows), device=narrow.device)
        optimizer.step()
        before = drawn(torch.device("cpu"), torch.float32, 0)
        same = [torch.equal(p.cpu(), before[name]) for name, p in parameters.items()]
        assert same == [overflows] * len(same)
        averages = [optimizer.state[parameters[name]]["exp_avg"].cpu() for name in ("norm.weight", "norm.bias")]
        for average, name in zip(averages, ("norm.weight", "norm.bias"), strict=True):
            expected = drawn(torch.device("cpu"), torch.float32, 1)[name] * (0.0 if overflows else 0.1)
            torch.testing.assert_close(average, expected)
        assert optimizer.metrics()["muon_gradient_norm"].item() < 50 * 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_gradient", [True, False])
def test_clipped_heads(portable_kernel, kind, has_gradient):
    """Two heads, the first of which has logits four times too large, on query and key weights."""
    names, threshold = ("attn.q_proj.weight", "attn.k_proj.weight"), 1.0
    with narrow_device(portable_kernel, kind) as narrow:
        parameters = {name: torch.ones(16, 8).to(narrow.device) for name in names}
        clip = {"threshold": threshold, "head_dim": 8}
        optimizer = portable_kernel.Muon(parameters.items(), lr=0.0, weight_decay=0.0, qk_clip=clip)
        optimizer.observe_qk_logits("attn", torch.tensor([4.0, 0.5]).to(narrow.device))
        for p in parameters.values():
            p.grad = torch.ones(16, 8).to(narrow.device) if has_gradient else None
        optimizer.step()
        for p in parameters.values():
            assert p.cpu()[:, 0].tolist() == pytest.approx([0.5] * 8 + [1.0] * 8, rel=4 * UNIT)
        assert optimizer.metrics()["heads_clipped"].item() == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["standard", "gram_float32"])
def test_functions(portable_kernel, kind, method):
    G = torch.randn(3, 20, 30, generator=torch.Generator().manual_seed(0))
    with narrow_device(portable_kernel, kind) as narrow:
        factor = portable_kernel.orthogonalize(G.to(narrow.device), method=method).cpu()
        square = portable_kernel.matmul_transpose(G.to(narrow.device)).cpu()
    expected = portable_kernel.orthogonalize(G, method=method, dtype=torch.float32)
    torch.testing.assert_close(factor, expected, rtol=0, atol=AMPLIFICATION * ROUNDINGS * UNIT)
    torch.testing.assert_close(square, G @ G.mT)


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_up_changes_nothing(portable_kernel, kind):
    with narrow_device(portable_kernel, kind) as narrow:
        parameters = drawn(narrow.device, torch.float32, 0)
        optimizer = portable_kernel.Muon(parameters.items())
        optimizer.warmup(progress=lambda *_: None)
        expected = drawn(torch.device("cpu"), torch.float32, 0)
        assert all(torch.equal(p.cpu(), expected[name]) for name, p in parameters.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_comes_back(run, portable_kernel, kind):
    with narrow_device(portable_kernel, kind) as narrow:
        first = Run(portable_kernel, narrow, torch.float32, {"second_moment": "rows", "momentum_dtype": "int8"})
        other = portable_kernel.Muon(first.parameters.items())
        other.load_state_dict(first.optimizer.state_dict())
        other.step()
        first.optimizer.step()
        for p in first.parameters.values():
            for key, value in first.optimizer.state[p].items():
                assert torch.equal(other.state[p][key].cpu(), value.cpu())
