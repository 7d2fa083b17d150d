"""What a contest launches of a candidate was compiled before, by the static check on the same machine."""

from __future__ import annotations

from collections.abc import Hashable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tools.lab import candidates
from tools.lab.items import Lab
from tools.lab.records import Record, Records, append
from tools.lint.cases import operands
from tools.lint.judgements import LIMITS


@pytest.fixture
def lab(kernel, tmp_path):
    Records(tmp_path, {})
    return Lab(kernel, torch.device("cpu"), tmp_path, tmp_path, (), True)


@pytest.mark.parametrize("capability, kib", [((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227), ((12, 0), 99)])
def test_a_candidate_is_held_to_the_shared_memory_of_its_gpu(lab, monkeypatch, capability, kib):
    """A block's, by the table of compute capabilities in NVIDIA's CUDA programming guide."""
    monkeypatch.setattr(candidates, "capability", lambda lab: capability)
    assert LIMITS[candidates.lint_target(lab)].shared == kib << 10


def compiled_for(*arguments: object) -> Hashable:
    """Return what Triton compiles anew for: the dtype and alignment of tensors, integers that are 1 or divide by 16."""
    seen = []
    for each in arguments:
        if isinstance(each, Tensor):
            seen.append((each.dtype, each.data_ptr() % 16 == 0))
        elif isinstance(each, (tuple, list)):
            seen.append(len(each))  # of numbers, none of which is compiled in
        else:
            seen.append((each == 1, each % 16 == 0))
    return tuple(seen)


def of_product(lab: Lab, operands: tuple, config: tuple) -> Hashable:
    (A, B, D, C), tuned = operands, lab.kernel.kernels.gpu.tuned
    made = candidates.module(lab, "symmetric_gemm").arrange(A, B, D, C, tuned.Config(*config))
    m, k, _, *strides = made.sizes  # the third is not specialized
    return made.constants, compiled_for(A, B, C if D is None else D, C, m, k, *strides)


def of_small(G: Tensor, C: Tensor, steps: list[float], scaling: tuple, config: tuple) -> Hashable:
    (m, n), panel = G.shape[1:], max(config[1:3])
    return tuple(config), scaling[2], compiled_for(G, C, steps, m, n, -(-n // panel) * panel, *G.stride(), *C.stride())


def run_contest(lab: Lab, kernel: str, size: tuple[int, int], config: tuple) -> None:
    need = lab.kernel.kernels.speeds.measurement_file.Need(kernel, "float16", *size)
    task = lab.kernel.tuning.contest.Task(need, lab.device, 3)
    contest = lab.kernel.tuning.gpu_contest.gpu_contest(task, [config], (48, 16))
    candidate = contest.candidates["-".join(map(str, config))]
    candidate.prove()
    candidate.run()


@pytest.mark.parametrize("size", [(32, 48), (32, 32)], ids=["long", "square"])
def test_products_of_a_contest_are_compiled_ahead(lab, monkeypatch, size):
    module, launched = candidates.module(lab, "symmetric_gemm"), set()

    def launch(A, B, D, C, scalars, config):
        launched.add(of_product(lab, (A, B, D, C), config))
        module._on_cpu(A, B, D, C, *(torch.tensor(float(x)) for x in scalars))

    monkeypatch.setattr(module, "launch_symmetric_gemm", launch)
    config = lab.kernel.kernels.gpu.tuned.Config(64, 64, 8, 4, 4)
    run_contest(lab, "symmetric_gemm", size, config)
    made = candidates.cases(lab, candidates.Launch("symmetric_gemm", torch.float16, config))
    ahead = {of_product(lab, operands(case), case.config) for case in made}
    assert launched == ahead and len(ahead) == len(candidates.RACED)


def test_small_matrices_of_a_contest_are_compiled_ahead(lab, monkeypatch):
    module, launched, ahead = candidates.module(lab, "small_polar"), set(), set()

    def launch(G, C, steps, scaling, config):
        launched.add(of_small(G, C, steps, scaling, config))
        module._on_cpu(G, C, steps, *scaling)

    def compile_launch(gpu, package, name, arguments):
        ahead.add(of_small(*arguments(SimpleNamespace(SmallConfig=tuple_of))))

    def tuple_of(*fields):
        return fields

    monkeypatch.setattr(module, "launch_small_polar", launch)
    monkeypatch.setattr(candidates, "compile_launch", compile_launch)
    config = lab.kernel.kernels.gpu.tuned.SmallConfig(16, 16, 16, 1, 2, 0)
    run_contest(lab, "small_polar", (16, 32), config)
    for case in candidates.cases(lab, candidates.Launch("small_polar", torch.float16, config)):
        case.compile(lab.variants)
    assert launched == ahead and len(ahead) == 6


@pytest.mark.parametrize("status", ["ok", "failed"])
def test_the_check_is_done_again_where_nothing_is_compiled(lab, monkeypatch, tmp_path, status):
    """Its record may come from another machine; what it refused there is refused here, too, until it has run."""
    monkeypatch.setattr(candidates.triton.knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setattr(candidates, "examine_all", lambda *_: [])
    launch = candidates.product_launches(lab, torch.float16)[0]
    assert candidates.fit(lab, [launch]) == [launch]
    value = {"refused": {launch.key: ["spills"]}}
    append(lab.out / "records.jsonl", Record("tune", candidates.STATIC_CHECK, status, 1.0, value=value))
    assert not candidates.is_checked_here(lab) and candidates.fit(lab, [launch]) == []
    candidates.examine(lab)
    assert candidates.is_checked_here(lab)
    Records(lab.out, {"commit": "another"})
    assert not candidates.is_checked_here(lab)
