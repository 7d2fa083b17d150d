"""Laws of the kernel for small matrices on the device itself; each check returns what is wrong."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tools.lab.candidates import SMALL, module
from tools.lab.items import Lab
from tools.lab.optimizer_checks import distance
from tools.lab.product_checks import Draw, every_other, said

EPS = 1e-7

# How matrices (b, m, n) lie in memory; tall ones come as their transposed view.
LAYOUTS = {
    "wide": lambda G: G,
    "tall": lambda G: G.mT.contiguous().mT,
    "sliced": every_other,
}


def launch(lab: Lab, G: Tensor, iteration, config: tuple) -> Tensor:
    """Return the factors of G by one launch, in a result that held NaN."""
    small, C = module(lab, SMALL), torch.full_like(G, math.nan, dtype=iteration.work_dtype)
    scaling = iteration.scale, EPS, iteration.work_dtype
    small.launch_small_polar(G, C, steps_of(iteration), scaling, small.SmallConfig(*config))
    return C


def windows_of(iteration) -> list[tuple]:
    """Return the steps between one Gram matrix and the next: the standard iteration makes one at every step."""
    return [(step,) for step in iteration.windows[0]] if iteration.method == "standard" else list(iteration.windows)


def steps_of(iteration) -> list[float]:
    """Return a, b, c of each step and whether its window ends with it, as the kernel takes them."""
    windows = windows_of(iteration)
    return [float(x) for window in windows for i, step in enumerate(window, 1) for x in (*step, i == len(window))]


def iterations(lab: Lab, dtype: torch.dtype, m: int, n: int) -> dict:
    """Return the iterations that the kernel runs in one dtype, by method."""
    schedule = lab.kernel.schedules.resolve_schedule("polar_express", 5)
    methods = ("standard", "gram") if dtype == torch.float16 else ("standard",)
    choose = lab.kernel.iteration.choose_iteration
    return {method: choose(lab.device, dtype, (m, n), schedule, method) for method in methods}


def check_small(lab: Lab, dtype: torch.dtype, config: tuple) -> list[str]:
    """A launch errs at most twice as much as torch's products; a matrix gets its bits in any company, a NaN stays."""
    draw, problems, side = Draw(lab.device), [], config[0]
    # Next to squares luck decides how the smallest singular value is treated.
    for m, n in ((side - 3, 4 * side - 1), (side, 2 * side))[: 1 if lab.tiny else None]:
        G = draw.normal(2 if lab.tiny else 3, m, n)
        exact = lab.kernel.orthogonalize(G.double().cpu(), method="standard")
        for method, iteration in iterations(lab, dtype, m, n).items():
            torchs = iteration._replace(products=lab.kernel.kernels.products.BATCHED, in_one_launch=False)
            allowed = 2 * distance(lab.kernel.polar.polar_factors(G, torchs, EPS), exact)
            C = launch(lab, G, iteration, config)
            found = distance(C, exact)
            if not found <= allowed:
                problems.append(f"{m} x {n} {method}: error {found:.1e} where {allowed:.1e} is allowed")
            spoiled = G.clone()
            spoiled[0, 0, 0] = math.nan
            others = launch(lab, spoiled, iteration, config)
            if not torch.equal(others[1:], C[1:]) or not others[0].isnan().any():
                problems.append(f"{m} x {n} {method}: a NaN changed its neighbours, or went away")
            if not torch.equal(launch(lab, G[1:2], iteration, config), C[1:2]):
                problems.append(f"{m} x {n} {method}: other bits alone than in a batch")
    return said(problems, draw)


def check_small_layout(lab: Lab, dtype: torch.dtype, layout: str) -> list[str]:
    """The operation gives the bits of contiguous operands for every layout, and writes its result alone."""
    small, draw, problems = module(lab, SMALL), Draw(lab.device), []
    for m, n in ((7, 7), (13, 40)) if lab.tiny else ((1, 1), (7, 7), (13, 40), (60, 300), (128, 129)):
        G = draw.normal(2, m, n)
        (iteration,) = list(iterations(lab, dtype, m, n).values())[:1]
        expected = small.small_polar(G, windows_of(iteration), iteration.scale, EPS, dtype)
        buffer = G.new_full((3, 2 * m + 1, 2 * n + 3), 7.0, dtype=dtype)
        C = buffer[1:, 1::2, 3::2].fill_(math.nan)
        given = LAYOUTS[layout](G)
        small.small_polar_(given, C, steps_of(iteration), iteration.scale, EPS, dtype)
        if not torch.equal(C, expected):
            problems.append(f"{m} x {n}: other bits than for contiguous operands")
        C.fill_(7.0)
        if not (buffer == 7.0).all():
            problems.append(f"{m} x {n}: written outside of the result")
    return said(problems, draw)
