"""Stage 3: the fastest configuration for each size, and the sizes from which one method is faster than another.

The package's own contest proves the candidates and times them, as a step runs them, against torch's products. The lab
tries more candidates than `warmup`: all that passed the static check. The winner goes into the device's file
of configurations, which the package reads from then on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache, partial

import torch

from benchmarks.machine import describe
from benchmarks.predicted_factors import predicted_by_torch
from benchmarks.predicted_step import in_config
from benchmarks.shapes import MODELS, matrix_counts
from benchmarks.timing import replayed, take_turns
from tools.lab.candidates import (
    PRODUCT,
    SMALL,
    STATIC_CHECK,
    Launch,
    examine,
    fit,
    is_checked_here,
    lint_target,
    module,
    product_launches,
    short,
    small_launches,
    target,
)
from tools.lab.configs import read_entries, withdraw, write_entry
from tools.lab.environment import copied_in_a_second
from tools.lab.items import FailedError, Item, Lab, require_triton

# (m, k) of the product. Sizes of common layers come first, because the time may run out.
SIZES = (
    (1024, 1024), (2048, 2048), (4096, 4096), (768, 768), (512, 512), (768, 3072), (1024, 4096), (2048, 8192),
    (4096, 16384), (256, 256), (512, 2048), (3072, 3072), (128, 128), (8192, 8192), (1536, 1536), (1280, 5120),
)  # fmt: skip
TINY_SIZES, TINY_RAGGED = ((32, 48), (32, 32)), (48, 16)

# (m, n) of small matrices.
SMALL_SIZES = ((64, 64), (128, 128), (128, 512), (64, 256), (32, 32), (16, 16), (128, 2048))
TINY_SMALL_SIZES = ((16, 24),)

# (m, n) at which the standard and the Gram iteration are compared.
ITERATED = tuple((m, ratio * m) for m in (512, 1024, 2048, 4096) for ratio in (1, 2, 4, 8) if ratio * m <= 16384)
TINY_ITERATED = ((16, 48),)

# The number of matrices for sizes that no named model has: about as many as a model has layers, or heads.
USUAL_COUNT, USUAL_SMALL_COUNT, TINY_COUNT = 24, 64, 2
# The most seconds of an item's race, once its candidates are compiled and proven.
RACE_SECONDS = 20.0


def items(lab: Lab) -> Iterator[Item]:
    """Yield the items of this stage."""
    yield Item(STATIC_CHECK, partial(examine, lab), 300.0, again=not is_checked_here(lab))
    halves = lab.kernel.kernels.formats.HALF_DTYPES
    for m, k in TINY_SIZES if lab.tiny else SIZES:
        for dtype in halves[: 1 if lab.tiny else None]:
            yield Item(f"{PRODUCT} {short(dtype)} {m}x{k}", partial(tune_product, lab, dtype, (m, k)), 90.0)
    for m, n in TINY_SMALL_SIZES if lab.tiny else SMALL_SIZES:
        yield Item(f"{SMALL} float16 {m}x{n}", partial(tune_small, lab, (m, n)), 90.0)
    for m, n in TINY_ITERATED if lab.tiny else ITERATED:
        yield Item(f"methods float16 {m}x{n}", partial(compare_methods, lab, (m, n)))


def tune_product(lab: Lab, dtype: torch.dtype, size: tuple[int, int]) -> dict:
    """Find the entry for m x k matrices and their products, write it to the file of configurations, and return it."""
    require_triton(lab)
    return tune(lab, size, [incumbent(lab, PRODUCT, dtype, size), *product_launches(lab, dtype)])


def tune_small(lab: Lab, size: tuple[int, int]) -> dict:
    """Find the entry for the factors of m x n matrices in float16, write it, and return it."""
    require_triton(lab)
    side = lab.kernel.kernels.gpu.tuned.padded_side(size[0])
    dtype = torch.float16
    return tune(lab, size, [incumbent(lab, SMALL, dtype, size), *small_launches(lab, dtype, side)])


def tune(lab: Lab, size: tuple[int, int], launches: list[Launch]) -> dict:
    """Return the winner among `launches`, of which the first is launched today. FailedError if some are wrong.

    Wrong ones are left out from then on, and entries that name them are removed.
    """
    tuning, kernel, dtype = lab.kernel.tuning, launches[0].kernel, launches[0].dtype
    configs = [launch.config for launch in fit(lab, dict.fromkeys(launches))]
    if not configs:
        raise FailedError("the static check has refused every candidate")
    need = lab.kernel.kernels.speeds.measurement_file.Need(kernel, short(dtype), *size)
    task = tuning.contest.Task(need, lab.device, count_of(lab, kernel, size))
    clock, seconds = tuning.race.Clock(lab.device), 0.0 if lab.tiny else RACE_SECONDS
    contest = tuning.gpu_contest.gpu_contest(task, configs, TINY_RAGGED if lab.tiny else None)
    finding = tuning.findings.compete(task, contest, clock, lambda: seconds)
    leave_out(lab, finding)
    if finding.entry is None:
        raise FailedError(finding.summary)
    entry = {**finding.entry, "candidates": len(finding.times)}
    if tuning.gpu_contest.TORCH in finding.times:
        entry["other_seconds"] = finding.times[tuning.gpu_contest.TORCH].seconds * entry["count"]
    write_entry(lab.configs, header(lab), kernel, short(dtype), entry)
    read_again(lab)
    torchs_count = contest.candidates[tuning.gpu_contest.TORCH].count
    entry.update(predicted_times(lab, task, entry, torchs_count))  # used in the report only
    if finding.failed:
        raise FailedError("; ".join(f"{name}: {why}" for name, why in finding.failed.items()), entry)
    return entry


def predicted_times(lab: Lab, task, entry: dict, torchs_count: int) -> dict[str, float]:
    """Return the times that the package's model predicts for what was timed; empty if it predicts nothing.

    torch's product was timed for `torchs_count` matrices, and its times are those of as many as the entry has.
    `benchmarks.predicted_step` predicts the compiled product's, for which the lab must have timed a copy.
    """
    (kernel, _, m, k), tuned = task.need, lab.kernel.kernels.gpu.tuned
    gpu, copied = lab.kernel.kernels.speeds.machine.gpu_of(task.device), copied_in_a_second(lab)
    if kernel != PRODUCT or gpu is None or copied is None:
        return {}
    size, config = (entry["count"], m, k), tuned.config_of(entry, tuned.Config)
    ours = in_config(lab.kernel, gpu, size, config, copied)
    if ours is None:
        return {}
    torchs = predicted_by_torch(lab.kernel, gpu, (torchs_count, m, k), copied)
    products = 1 if k != m else 2  # for square matrices the iteration's two products, as `gpu_contest` times them
    return {
        "predicted_seconds": products * ours,
        "predicted_other_seconds": torchs * entry["count"] / torchs_count,
    }


def leave_out(lab: Lab, finding) -> None:
    """Store in the lab's caches which candidates are wrong, and remove entries that name them."""
    measurements, need = lab.kernel.kernels.speeds.measurements, finding.task.need
    if finding.failed:
        lab.kernel.tuning.findings.store(finding.task, None, finding.failed)
        device = describe(lab.kernel, lab.device)["device"]
        withdraw(
            lab.configs,
            device,
            (need.kernel, need.dtype),
            lambda entry: measurements.candidate_name(entry, need.kernel) in finding.failed,
        )


def read_again(lab: Lab) -> None:
    """Make the package read the file of configurations again, because it has changed."""
    lab.kernel.kernels.speeds.measurements.shipped.cache_clear()


def compare_methods(lab: Lab, size: tuple[int, int]) -> dict:
    """Return the seconds of the standard and the Gram iteration in float16, and what `auto` chooses."""
    read_again(lab)
    schedule = lab.kernel.schedules.resolve_schedule("polar_express", 5)
    chosen = lab.kernel.iteration.choose_iteration(lab.device, torch.float16, size, schedule)
    together = lab.kernel.polar.packing.matrices_together(lab.device, size, chosen)
    X = lab.kernel.tuning.contest.drawn(lab.device, min(count_of(lab, PRODUCT, size), together), *size)
    methods = ("standard", "gram")
    orthogonalize = partial(lab.kernel.orthogonalize, X, dtype=torch.float16)
    works = [replayed([partial(orthogonalize, method=method)], X.device) for method in methods]
    times = take_turns(works, X.device, lab.rounds)
    timed = {f"{method}_seconds": seconds for method, (seconds, _) in zip(methods, times)}
    spreads = {f"{method}_spread": spread for method, (_, spread) in zip(methods, times)}
    return {"m": size[0], "n": size[1], "batch": len(X), **timed, **spreads, "auto": str(chosen)}


def count_of(lab: Lab, kernel: str, size: tuple[int, int]) -> int:
    """Return how many matrices of a size a step has: the most in any named model, or the usual number."""
    if lab.tiny:
        return TINY_COUNT
    usual = USUAL_SMALL_COUNT if kernel == SMALL else USUAL_COUNT
    return max((counts.get(size, 0) for counts in counts_of_models()), default=0) or usual


@cache
def counts_of_models() -> list[dict[tuple[int, int], int]]:
    """Return, for each named model, how many matrices of each size it has, the short side first."""
    counted = []
    for parameters in MODELS.values():
        sizes: dict[tuple[int, int], int] = {}
        for shape, count in matrix_counts(parameters).items():
            size = min(shape), max(shape)
            sizes[size] = sizes.get(size, 0) + count
        counted.append(sizes)
    return counted


def incumbent(lab: Lab, kernel: str, dtype: torch.dtype, size: tuple[int, int]) -> Launch:
    """Return the launch that is chosen for this size today: the nearest entry in the file, or the safe one."""
    tuned = lab.kernel.kernels.gpu.tuned
    kind = tuned.Config if kernel == PRODUCT else tuned.SmallConfig
    listed = read_entries(lab.configs[0], describe(lab.kernel, lab.device)["device"], kernel, short(dtype))
    entries = [(e["m"], e["k"], e) for e in listed]
    nearest = lab.kernel.kernels.speeds.measurements.nearest_of(entries, *size)
    if nearest is not None and (kernel == PRODUCT or nearest["side"] == tuned.padded_side(size[0])):
        return Launch(kernel, dtype, tuned.config_of(nearest, kind))
    if kernel == SMALL:
        return Launch(kernel, dtype, tuned.safe_small_config(target(lab), dtype, size[0]))
    if lab.tiny:
        return product_launches(lab, dtype)[0]
    descriptors = module(lab, PRODUCT).reads_descriptors(lab.device)
    return Launch(kernel, dtype, tuned.safe_config(target(lab), dtype, size[0], descriptors, True))


def likeness(lab: Lab) -> dict:
    """Return the facts by which similar GPUs are recognised; empty in a dry run."""
    if lab.device.type != "cuda":
        return {}
    count = torch.cuda.get_device_properties(lab.device).multi_processor_count
    return {"capability": target(lab).capability, "multiprocessors": count}


def header(lab: Lab) -> dict:
    """Return the header of a file of configurations."""
    facts = describe(lab.kernel, lab.device)
    versions = {name: facts[name] for name in ("torch", "cuda", "triton", "commit", "dirty")}
    return {
        "device": facts["device"],
        "target": lint_target(lab),
        **likeness(lab),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions,
    }
