"""The lab's checks find planted faults, and nothing where nothing is wrong."""

from __future__ import annotations

from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch

from tools.lab import product_checks, small_checks, step_checks
from tools.lab.items import Lab


def spoiled(module, spoil) -> SimpleNamespace:
    """The operation, with what it returns or writes spoiled afterwards."""

    def symmetric_gemm(A, B, D=None, alpha=1.0, beta=0.0, out=None):
        C = spoil(module.symmetric_gemm(A, B, D, alpha, beta))
        return C if out is None else out.copy_(C)

    return SimpleNamespace(symmetric_gemm=symmetric_gemm)


SPOILED = {
    "right": lambda C: C,
    "wrong": lambda C: C * 1.02,
    "asymmetric": lambda C: C + torch.ones_like(C).triu(1) * 1e-1,
    "not a number": lambda C: C.index_fill(1, torch.tensor([0]), torch.nan),
    "silent": lambda C: C.nan_to_num(),
}


@pytest.mark.parametrize("spoil", SPOILED)
@pytest.mark.parametrize("check", [product_checks.check_layout, product_checks.check_nan], ids=["layout", "nan"])
def test_a_check_finds_what_is_wrong_with_a_product(kernel, check, spoil, tmp_path):
    module = spoiled(kernel.kernels.symmetric_gemm, SPOILED[spoil])
    broken = SimpleNamespace(kernels=SimpleNamespace(symmetric_gemm=module))
    lab = Lab(broken, torch.device("cpu"), tmp_path, tmp_path, (), tiny=True)
    arguments = ["sliced"] if check is product_checks.check_layout else []
    # The neighbours of a NaN are compared with the same product without it, which is spoiled alike.
    seen = {"not a number", "silent"} if check is product_checks.check_nan else set(SPOILED) - {"right", "silent"}
    assert bool(check(lab, torch.float16, *arguments)) == (spoil in seen)


def without_overflow(scaling):
    return lambda grad_scale, found_inf: scaling(grad_scale, None)


def inexact(polar_factors):
    return lambda *arguments: 1.001 * polar_factors(*arguments)


def unshared(split_matrices):
    return lambda *arguments: ({k: v for part in split_matrices(*arguments) for k, v in part.items()}, {})


FAULTS = {
    "nothing is exchanged": (step_checks.check_exchange, "planned_optimizer", "split_matrices", unshared),
    "exchange": (step_checks.check_exchange, "distributed.sharded", "polar_factors", inexact),
    "scaler": (step_checks.check_scaler, "muon", "GradientScaling", without_overflow),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_check_finds_what_is_wrong_with_a_step(kernel, fault, tmp_path, monkeypatch):
    check, place, name, spoil = FAULTS[fault]
    lab = Lab(kernel, torch.device("cpu"), tmp_path, tmp_path, (), tiny=True)
    assert check(lab, torch.float32) == []
    module = attrgetter(place)(kernel)
    monkeypatch.setattr(module, name, spoil(getattr(module, name)))
    assert check(lab, torch.float32)


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_small_matrices_are_proven_with_the_steps_that_the_package_takes(kernel, method, monkeypatch):
    small, given = kernel.kernels.small_polar, []
    monkeypatch.setattr(small, "small_polar", lambda G, windows, *_: given.append(list(windows)) or G)
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    cpu = torch.device("cpu")
    iteration = kernel.iteration.choose_iteration(cpu, torch.float16, (16, 48), schedule, method)
    kernel.polar.polar_factors(torch.ones(1, 16, 48), iteration._replace(in_one_launch=True), 1e-7)
    assert given == [small_checks.windows_of(iteration)]
