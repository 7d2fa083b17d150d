"""Which configurations compete on a GPU, and which of them is the one that is launched untuned."""

from __future__ import annotations

import pytest
import torch

from tests.tuning.test_gpu_contest import CPU, HALF, SIZE

LARGE = (2048, 2048)


@pytest.fixture
def ship(kernel, gpu, measurements, monkeypatch):
    """Returns a function that makes entries ship for the GPU: of each kernel, in float16, a configuration by size."""

    def shipping(**configs):
        table = {
            name: {"float16": [{"m": m, "k": k, **config._asdict()} for (m, k), config in by_size.items()]}
            for name, by_size in configs.items()
        }
        monkeypatch.setattr(measurements, "shipped", lambda name: (name, table))

    return shipping


def compete(kernel, dtype=HALF, size=SIZE):
    candidates = kernel.tuning.candidates
    return candidates.product_configs(CPU, dtype, size), candidates.small_configs(CPU, dtype, size)


def launched(kernel, size):
    """What a product of this size is launched with on this GPU."""
    A = torch.empty(1, *size, dtype=HALF)
    C = A.new_empty(1, size[0], size[0])
    return kernel.kernels.gpu.symmetric_gemm.config_for("a GPU", kernel.kernels.gpu.tuned.HOPPERS, (A, A.mT, None, C))


@pytest.fixture
def safe(kernel):
    tuned = kernel.kernels.gpu.tuned
    of = tuned.HOPPERS, HALF, SIZE[0]
    return tuned.safe_config(*of, False, True), tuned.safe_small_config(*of)


@pytest.mark.parametrize("built", [False, True])
def test_the_compiled_product_competes_where_it_is_built(kernel, gpu, monkeypatch, built):
    monkeypatch.setattr(kernel.tuning.candidates, "is_built", lambda: built)
    products, _ = compete(kernel)
    assert {config in products for config in kernel.kernels.gpu.tuned.COMPILED} == {built}


def test_small_launches_that_ship_for_another_number_of_padded_rows_do_not_compete(kernel, ship, safe):
    """The nearest of them is not launched either."""
    small = {side: kernel.kernels.gpu.tuned.SmallConfig(side, 16, 16, 4, 3, 0) for side in (32, 64, 128)}
    ship(small_polar={SIZE: small[32], (60, 1024): small[64], (100, 1024): small[128]})
    _, (first, second, *others) = compete(kernel)
    assert (first, second) == (safe[1], small[64]) and {config.side for config in others} == {64}


@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("rows", [48, 8192])
def test_untuned_the_safe_product_for_these_rows_is_launched(kernel, gpu, monkeypatch, rows, descriptors):
    """As aligned operands are read, of which measurements are made."""
    candidates, tuned = kernel.tuning.candidates, kernel.kernels.gpu.tuned
    monkeypatch.setattr(candidates.symmetric_gemm, "reads_descriptors", lambda device: descriptors)
    safe = tuned.safe_config(tuned.HOPPERS, HALF, rows, descriptors, True)
    assert candidates.product_configs(CPU, HALF, (rows, rows))[0] == safe


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("size", [SIZE, LARGE, (1024, 3072)], ids=str)
def test_where_products_ship_the_nearest_one_is_launched_untuned(kernel, ship, monkeypatch, size, built):
    """If it is the compiled one, only where that is built: else the safe one."""
    tuned, candidates = kernel.kernels.gpu.tuned, kernel.tuning.candidates
    ship(symmetric_gemm={LARGE: tuned.COMPILED[1], SIZE: tuned.Config(32, 32, 8, 4, 2)})
    for module in candidates, kernel.kernels.gpu.hopper_gemm:
        monkeypatch.setattr(module, "is_built", lambda: built)
    monkeypatch.setattr(kernel.kernels.gpu.hopper_gemm, "fits", lambda *_: True)
    assert candidates.product_configs(CPU, HALF, size)[0] == launched(kernel, size)


def test_where_a_small_launch_ships_it_is_launched_untuned(kernel, ship):
    small = [kernel.kernels.gpu.tuned.SmallConfig(64, 16, 16, 4, stages, 0) for stages in (2, 3)]
    ship(small_polar={(64, 4096): small[0], SIZE: small[1]})
    assert compete(kernel)[1][0] == small[1] and small[0] in compete(kernel)[1]


def test_all_launches_that_ship_for_a_kernel_and_dtype_compete(kernel, ship):
    tuned = kernel.kernels.gpu.tuned
    products = {tuned.Config(32, 32, 8, 4, stages) for stages in (2, 3)}
    small = {tuned.SmallConfig(64, 16, 16, 4, stages, 0) for stages in (2, 3)}
    ship(symmetric_gemm=dict(zip((SIZE, LARGE), products)), small_polar=dict(zip((SIZE, LARGE), small)))
    for dtype, competing in ((HALF, (products, small)), (torch.bfloat16, (set(), set()))):
        assert tuple({*configs} & each for configs, each in zip(compete(kernel, dtype), (products, small))) == competing


def test_what_needs_no_compiling_is_proven_first(kernel, ship, safe):
    """After the one that is launched untuned, also where configurations of Triton's kernel are shipped."""
    tuned = kernel.kernels.gpu.tuned
    shipped = {SIZE: tuned.Config(32, 32, 8, 4, 2), LARGE: tuned.Config(32, 32, 8, 4, 3)}
    ship(symmetric_gemm=shipped)
    products, _ = compete(kernel)
    assert products[:2] == [shipped[SIZE], safe[0]]
    assert {*products[2:5]} == {*tuned.COMPILED} and products[5] == shipped[LARGE]
