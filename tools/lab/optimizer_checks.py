"""Laws of the iteration, the compiled operations and the optimizer on the device; each check returns what is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tools.lab.items import Lab, NotApplicableError
from tools.lab.product_checks import Draw, said

SHAPES = {"square": (2, 256, 256), "wide": (2, 256, 1024), "tall": (3, 640, 192)}
TINY_SHAPES = {"square": (2, 16, 16), "wide": (2, 16, 48), "tall": (3, 40, 16)}
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def shapes(lab: Lab) -> dict[str, tuple[int, int, int]]:
    return TINY_SHAPES if lab.tiny else SHAPES


def distance(x: Tensor, reference: Tensor) -> float:
    """Return the relative error of x in the Frobenius norm; what is not a number is infinitely far."""
    found = ((x.double().cpu() - reference).norm() / reference.norm()).item()
    return found if found == found else float("inf")


def check_iteration(lab: Lab, dtype: torch.dtype, method: str) -> list[str]:
    """On symmetric products a method errs at most twice as much as on torch's, against float64 on the CPU.

    The Gram iteration runs on long matrices, which it is for: a square's smallest singular value is left to luck.
    """
    kernel, draw, problems = lab.kernel, Draw(lab.device), []
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    for name, shape in shapes(lab).items():
        if method == "gram" and name == "square":
            continue
        G = draw.normal(*shape)
        exact = kernel.orthogonalize(G.double().cpu(), method="standard")
        sides = tuple(sorted(shape[1:]))
        iteration = kernel.iteration.choose_iteration(lab.device, dtype, sides, schedule, method)
        tables = kernel.kernels.products.BATCHED, kernel.kernels.products.SYMMETRIC
        chosen = [iteration._replace(products=table, in_one_launch=False) for table in tables]
        factors = [kernel.polar.polar_factors(G, of, 1e-7) for of in chosen]
        torchs, ours = (distance(x, exact) for x in factors)
        if not ours <= 2 * torchs:
            problems.append(f"{name}: error {ours:.1e}, on torch's products {torchs:.1e}")
    return said(problems, draw)


def check_batch(lab: Lab, dtype: torch.dtype) -> list[str]:
    """A NaN and a zero matrix leave their neighbours as they are, and zero stays zero."""
    draw, problems = Draw(lab.device), []
    for name, shape in shapes(lab).items():
        G = draw.normal(shape[0] + 2, *shape[1:])
        clean = lab.kernel.orthogonalize(G, dtype=dtype)
        G[0] = 0
        G[1, 0, 0] = torch.nan
        result = lab.kernel.orthogonalize(G, dtype=dtype)
        if not torch.equal(result[2:], clean[2:]) or result[0].any() or not result[1].isnan().any():
            problems.append(f"{name}: a matrix changed its neighbours")
    return said(problems, draw)


def check_capture(lab: Lab, dtype: torch.dtype) -> list[str]:
    """A captured graph, replayed on new values, gives the bits of the eager call."""
    if lab.device.type != "cuda":
        raise NotApplicableError("graphs are captured on GPUs alone")
    draw, problems = Draw(lab.device), []
    symmetric_gemm = lab.kernel.kernels.symmetric_gemm.symmetric_gemm
    works: dict[str, Callable[[Tensor], Tensor]] = {
        "symmetric_gemm": lambda X: symmetric_gemm(X, X.mT, alpha=2.0),
        "orthogonalize": lambda X: lab.kernel.orthogonalize(X, dtype=dtype),
    }
    for name, work in works.items():
        for shape in shapes(lab).values():
            X, later = draw.normal(*shape, dtype=dtype), draw.normal(*shape, dtype=dtype)
            if not torch.equal(replayed(work, X, later), work(later)):
                problems.append(f"{name} {shape}: other bits")
    return said(problems, draw)


def replayed(work: Callable[[Tensor], Tensor], X: Tensor, later: Tensor) -> Tensor:
    """Return what a graph of `work`, captured on X, computes once X has become `later`."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work(X)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work(X)
    X.copy_(later)
    graph.replay()
    return captured.clone()


def check_compiled(lab: Lab, dtype: torch.dtype) -> list[str]:
    """`torch.compile(orthogonalize)`, in one graph, errs at most twice as much as the eager call."""
    draw = Draw(lab.device)
    G = draw.normal(*shapes(lab)["wide"])
    exact = lab.kernel.orthogonalize(G.double().cpu(), method="standard")
    backend = "eager" if lab.tiny else "inductor"
    compiled = torch.compile(lambda G: lab.kernel.orthogonalize(G, dtype=dtype), fullgraph=True, backend=backend)
    eager, found = distance(lab.kernel.orthogonalize(G, dtype=dtype), exact), distance(compiled(G), exact)
    return said([] if found <= 2 * eager else [f"error {found:.1e}, eager {eager:.1e}"], draw)


def check_native(lab: Lab, stored: torch.dtype, packed_as: torch.dtype) -> list[str]:
    """The compiled operations give the bits of their twins on the CPU: one formula, whose added products are fma."""
    native, draw = lab.kernel.kernels.native, Draw(torch.device("cpu"))
    momentum, gradient = ([draw.normal(m, n, dtype=stored) for m, n in ((130, 70), (3, 900), (1, 1))] for _ in range(2))
    sizes = [x.numel() for x in momentum]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    numbers = [torch.tensor(x, dtype=torch.float64) for x in (0.02, 0.1, 1.5)]
    seeds = {} if stored.itemsize > 2 else {"seeds": torch.arange(3)}
    results = []
    for device in (torch.device("cpu"), lab.device):
        kept, given = ([x.clone().to(device) for x in group] for group in (momentum, gradient))
        packed = torch.full((sum(sizes),), torch.nan, dtype=packed_as, device=device)
        native.momentum_pack_(kept, given, packed, 0.95, True, offsets=offsets)
        stepped = [x.clone() for x in kept]
        native.descend_(stepped, packed, *numbers, 2, offsets=offsets, **seeds)
        results.append([x.cpu() for x in (*kept, packed, *stepped)])
    differing = sum((a != b).sum().item() for a, b in zip(*results))
    return said([f"{differing} elements have other bits"] if differing else [], draw)


def check_training(lab: Lab, dtype: torch.dtype) -> list[str]:
    """Steps of Muon on the device end as near to a run in float64 as four times a CPU's run in the same dtype does."""
    draw = Draw(torch.device("cpu"))
    width, steps = (16, 2) if lab.tiny else (96, 10)
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
    inputs, targets = draw.normal(32, width), draw.normal(32, width)

    def trained(device: torch.device, stored: torch.dtype, ns_dtype: torch.dtype) -> Tensor:
        own = copy.deepcopy(model).to(device, stored)
        optimizer = lab.kernel.Muon(own.named_parameters(), lr=0.02, ns_dtype=ns_dtype)
        for _ in range(steps):
            optimizer.zero_grad()
            (own(inputs.to(device, stored)) - targets.to(device, stored)).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten().double().cpu() for p in own.parameters()])

    cpu = torch.device("cpu")
    exact = trained(cpu, torch.float64, torch.float64)
    ours = distance(trained(lab.device, torch.float32, dtype), exact)
    cpus = distance(trained(cpu, torch.float32, dtype), exact)
    return said([] if ours <= 4 * cpus else [f"distance {ours:.1e}, the CPU's is {cpus:.1e}"], draw)
