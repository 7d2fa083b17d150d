"""Stage 3: the fastest configuration for each size, and where one way of computing overtakes another.

Candidates passed the static check. They are timed as graphs that rotate through operands larger than the cache, and the
fastest are proven before they are timed once more; a symmetric product that wins is proven at its own size, too. What
was chosen before stays unless it is slower by more than both spreads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.machine import describe
from benchmarks.timing import replayed, rotated, take_turns
from tests.support.inside import steps_of
from tests.support.small_polynomial import prove_small
from tests.support.symmetric_products import PROVEN_SIZES, WrongResultError, check_product, normal, prove_product
from tools.lab.candidates import (
    HALVES,
    PRODUCT,
    SMALL,
    STATIC_CHECK,
    Launch,
    examine,
    fit,
    lint_target,
    module,
    product_launches,
    short,
    small_launches,
    target,
)
from tools.lab.configs import read_entries, write_entry
from tools.lab.items import FailedError, Item, Lab
from tools.lab.racing import FINAL_ROUNDS, TINY_ROUNDS, Found, find_fastest

EPS = 1e-7

# (m, k) of the product, those of common layers first: the time may be over before the end.
SIZES = (
    (1024, 1024), (2048, 2048), (4096, 4096), (768, 768), (512, 512), (768, 3072), (1024, 4096), (2048, 8192),
    (4096, 16384), (256, 256), (512, 2048), (3072, 3072), (128, 128), (8192, 8192), (1536, 1536), (1280, 5120),
)  # fmt: skip
TINY_SIZES = ((32, 48),)

# (m, n) of small matrices; how many of them are timed at once, and by which number the entry's gain is.
SMALL_SIZES = ((64, 64), (128, 128), (128, 512), (64, 256), (32, 32), (16, 16), (128, 2048))
TINY_SMALL_SIZES = ((16, 24),)
SMALL_BATCHES, USUAL_BATCH = (1, 16, 64, 512), 64

# (m, n) at which the standard and the Gram iteration are compared.
ITERATED = tuple((m, ratio * m) for m in (512, 1024, 2048, 4096) for ratio in (1, 2, 4, 8) if ratio * m <= 16384)
TINY_ITERATED = ((16, 48),)

# A batch of products has about as many entries as one result of this side.
BATCH_SIDE = 2048


def items(lab: Lab) -> Iterator[Item]:
    """Yield the items of this stage."""
    yield Item(STATIC_CHECK, partial(examine, lab), 300.0)
    for m, k in TINY_SIZES if lab.tiny else SIZES:
        for dtype in HALVES[: 1 if lab.tiny else None]:
            yield Item(f"{PRODUCT} {short(dtype)} {m}x{k}", partial(tune_product, lab, dtype, m, k), 90.0)
    for m, n in TINY_SMALL_SIZES if lab.tiny else SMALL_SIZES:
        yield Item(f"{SMALL} float16 {m}x{n}", partial(tune_small, lab, m, n), 90.0)
    for m, n in TINY_ITERATED if lab.tiny else ITERATED:
        yield Item(f"methods float16 {m}x{n}", partial(compare_methods, lab, m, n))


def tune_product(lab: Lab, dtype: torch.dtype, m: int, k: int) -> dict:
    """Return the entry for X Xᵀ of X (b, m, k), having written it to the files of configurations."""
    X = drawn(lab, batch_of(lab, m), m, k).to(dtype)
    copies, out, launch = rotated(X), X.new_empty(len(X), m, m), module(lab, PRODUCT).launch_symmetric_gemm

    def calls(of: Launch) -> list[Callable]:
        return [partial(launch, x, x.mT, None, out, (1.0, 0.0), of.config) for x in copies]

    before = incumbent(lab, PRODUCT, dtype, m, k)
    found = find_fastest(fit(lab, product_launches(lab, dtype)), before, calls, partial(proof, lab), lab.tiny)
    out.fill_(torch.nan)
    calls(found.winner.launch)[0]()
    check_product(out, copies[0], copies[0].mT)
    torchs = seconds_of(lab, [partial(torch.bmm, x, x.mT, out=out) for x in copies])
    return written(lab, found, dtype, {"m": m, "k": k, **figures(found, torchs), "batch": len(X)})


def tune_small(lab: Lab, m: int, n: int) -> dict:
    """Return the entry for factors of G (b, m, n) in float16, with the batched iteration's time over the kernel's."""
    dtype = torch.float16
    schedule = lab.kernel.schedules.resolve_schedule("polar_express", 5)
    iteration = lab.kernel.iteration.choose_iteration(lab.device, dtype, (m, n), schedule)._replace(in_one_launch=False)
    launch, steps = module(lab, SMALL).launch_small_polar, steps_of(iteration)
    scaling = iteration.scale, EPS, dtype

    def calls(of: Launch, copies: list[Tensor]) -> list[Callable]:
        return [partial(launch, G, torch.empty_like(G, dtype=dtype), steps, scaling, of.config) for G in copies]

    side = lab.kernel.kernels.tuned.padded_side(m)
    usual, batches = (1, (1,)) if lab.tiny else (USUAL_BATCH, SMALL_BATCHES)
    copies = rotated(drawn(lab, usual, m, n))
    candidates = fit(lab, small_launches(lab, dtype, side))
    before = incumbent(lab, SMALL, dtype, m, n)
    found = find_fastest(candidates, before, partial(calls, copies=copies), partial(proof, lab), lab.tiny)
    times: dict[str, tuple[float, float]] = {}
    for batch in batches:
        copies = rotated(drawn(lab, batch, m, n))
        others = [partial(lab.kernel.polar.polar_factors, G, iteration, EPS) for G in copies]
        times[str(batch)] = seconds_of(lab, calls(found.winner.launch, copies)), seconds_of(lab, others)
    batched = times[str(usual)][1]
    gains = {batch: round(theirs / ours, 4) for batch, (ours, theirs) in times.items()}
    return written(lab, found, dtype, {"m": m, "k": n, **figures(found, batched), "gains": gains, "batch": usual})


def compare_methods(lab: Lab, m: int, n: int) -> dict:
    """Return the seconds of the standard and the Gram iteration in float16, and what `auto` takes."""
    lab.kernel.kernels.measurements.shipped.cache_clear()  # gains were written since the kernel was loaded
    X = drawn(lab, batch_of(lab, m), m, n)
    schedule = lab.kernel.schedules.resolve_schedule("polar_express", 5)
    chosen = lab.kernel.iteration.choose_iteration(lab.device, torch.float16, (m, n), schedule)
    methods = ("standard", "gram")
    orthogonalize = partial(lab.kernel.orthogonalize, X, dtype=torch.float16)
    works = [replayed([partial(orthogonalize, method=method)], X.device) for method in methods]
    times = take_turns(works, X.device, TINY_ROUNDS if lab.tiny else FINAL_ROUNDS)
    timed = {f"{method}_seconds": seconds for method, (seconds, _) in zip(methods, times)}
    spreads = {f"{method}_spread": spread for method, (_, spread) in zip(methods, times)}
    return {"m": m, "n": n, "batch": len(X), **timed, **spreads, "auto": str(chosen)}


def proof(lab: Lab, launch: Launch) -> str:
    """Return what is wrong with a launch, which is proven once in a process."""
    if launch not in PROVEN:
        PROVEN[launch] = ""
        try:
            with lab.device:
                prove(lab, launch)
        except WrongResultError as found:
            PROVEN[launch] = str(found)
    return PROVEN[launch]


PROVEN: dict[Launch, str] = {}


def prove(lab: Lab, launch: Launch) -> None:
    """Raise WrongResultError where a launch is wrong."""
    if launch.kernel == SMALL:
        start = module(lab, SMALL).launch_small_polar
        return prove_small(lambda *given: start(*given, launch.config), launch.config.side, launch.dtype)
    start = module(lab, PRODUCT).launch_symmetric_gemm
    sizes = TINY_SIZES if lab.tiny else PROVEN_SIZES
    return prove_product(lambda *given: start(*given, launch.config), launch.dtype, sizes)


def drawn(lab: Lab, *shape: int) -> Tensor:
    with lab.device:
        return normal(*shape)


def batch_of(lab: Lab, m: int) -> int:
    return 2 if lab.tiny else max(1, min(32, BATCH_SIDE**2 // m**2))


def seconds_of(lab: Lab, calls: list[Callable]) -> float:
    """Return what one of the calls takes, in a graph of all of them."""
    work = replayed(calls, lab.device)
    return take_turns([work], lab.device, TINY_ROUNDS if lab.tiny else FINAL_ROUNDS)[0][0] / len(calls)


def written(lab: Lab, found: Found, dtype: torch.dtype, entry: dict) -> dict:
    """Return an entry, having written it; FailedError, with the entry, where faster ones were wrong."""
    write_entry(lab.configs, header(lab), found.winner.launch.kernel, short(dtype), entry)
    if found.wrong:
        raise FailedError("; ".join(f"{key}: {problem}" for key, problem in found.wrong.items()), entry)
    return entry


def figures(found: Found, others: float) -> dict:
    """Return the fields that an entry has for every kernel; `gain` is the time of the `others` over the winner's."""
    winner, second = found.winner, found.second
    return {
        **winner.launch.config._asdict(),
        "gain": round(others / winner.seconds, 4),
        "seconds": winner.seconds,
        "spread": round(winner.spread, 4),
        "other_seconds": others,
        "margin": round(second.seconds / winner.seconds - 1, 4),
        "candidates": found.count,
    }


def incumbent(lab: Lab, kernel: str, dtype: torch.dtype, m: int, k: int) -> Launch:
    """Return the launch that is chosen for this size today: that of the entry of this size, or the safe one."""
    tuned = lab.kernel.kernels.tuned
    kind = tuned.Config if kernel == PRODUCT else tuned.SmallConfig
    for entry in read_entries(lab.configs[0], describe(lab.kernel, lab.device)["device"], kernel, short(dtype)):
        if (entry["m"], entry["k"]) == (m, k):
            return Launch(kernel, dtype, kind(*(entry[field] for field in kind._fields)))
    if kernel == SMALL:
        return Launch(kernel, dtype, tuned.safe_small_config(target(lab), dtype, m))
    if lab.tiny:
        return product_launches(lab, dtype)[0]
    descriptors = module(lab, PRODUCT).reads_descriptors(lab.device)
    return Launch(kernel, dtype, tuned.safe_config(target(lab), dtype, m, descriptors, True))


def likeness(lab: Lab) -> dict:
    """Return by what other GPUs are found to be like this one, nothing in a dry run."""
    if lab.device.type != "cuda":
        return {}
    count = torch.cuda.get_device_properties(lab.device).multi_processor_count
    return {"capability": target(lab).capability, "multiprocessors": count}


def header(lab: Lab) -> dict:
    """Return what a file of configurations says of itself."""
    facts = describe(lab.kernel, lab.device)
    versions = {name: facts[name] for name in ("torch", "cuda", "triton", "commit", "dirty")}
    return {
        "device": facts["device"],
        "target": lint_target(lab),
        **likeness(lab),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions,
    }
