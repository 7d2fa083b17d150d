"""The model that chooses products where nothing was measured: exact counts, and what it must not depend on."""

from __future__ import annotations

import math

import pytest
import torch

from tools.lint.waves import tiles, waves

H100 = (90, 132, 50 * 2**20)


@pytest.fixture
def predictions(kernel):
    return kernel.kernels.speeds.predictions


@pytest.fixture
def h100(predictions):
    return predictions.Gpu(*H100)


@pytest.mark.parametrize("batch, m", [(1, 2048), (16, 2048), (3, 1100), (1, 4096)])
def test_symmetric_time_is_its_waves_times_a_tile(predictions, h100, batch, m):
    """The count of waves is that of the lint's table; a tile's time and what comes once are read off two depths."""
    count = waves(tiles(m, predictions.TILE, True, batch), h100.multiprocessors).count
    once = predictions.SYMMETRIC_TILE_SECONDS + predictions.SYMMETRIC_LAUNCH_SECONDS
    rates = predictions.RATES[90]
    for k in (1024, 8192):
        tile = 2 * 128**2 * k / (rates.sustained * rates.symmetric) + 0.35 * predictions.SYMMETRIC_TILE_SECONDS
        assert math.isclose(predictions.symmetric_seconds(h100, batch, m, k), count * tile + once)


def test_nothing_is_faster_than_its_flops(predictions, h100):
    sustained = h100.multiprocessors * predictions.RATES[90].sustained
    for m in range(1024, 9000, 500):
        for k in (m, 4 * m):
            assert predictions.dense_seconds(h100, 2, (m, m, k)) >= 2 * 2 * m * m * k / sustained
            assert predictions.symmetric_seconds(h100, 2, m, k) >= 2 * m * m * k / sustained


def test_gain_stays_below_two_and_nears_its_rates(predictions, h100):
    """Half the FLOPs at 88 % of the rate against all of them at 97 %: 1.81 for large m, which counts of waves blur."""
    gains = {m: predictions.predicted_gain(h100, m, m) for m in range(512, 16385, 256)}
    assert all(0.5 < gain < 2 for gain in gains.values())
    assert gains[16384] == pytest.approx(2 * 0.88 / 0.97, rel=0.05)


@pytest.mark.parametrize("name", ["A100", "H100"])
def test_the_choice_holds_at_the_numbers_that_are_launched(predictions, h100, name):
    """Each of torch and the kernel at its best."""
    gpu = {"A100": predictions.Gpu(80, 108, 40 * 2**20), "H100": h100}[name]
    counts = range(1, predictions.matrices_together(gpu, 1024, 2) + 1)
    for k in (1024, 4096):
        dense = min(predictions.dense_seconds(gpu, b, (1024, 1024, k)) / b for b in counts)
        symmetric = min(predictions.symmetric_seconds(gpu, b, 1024, k) / b for b in counts)
        assert math.isclose(predictions.predicted_gain(gpu, 1024, k), dense / symmetric)


def test_half_a_wave_of_a_lone_matrix_is_no_gain(predictions, h100):
    """136 tiles for 132 multiprocessors are two waves, of which the second is nearly empty."""
    times = [predictions.symmetric_seconds(h100, batch, 2048, 2048) / batch for batch in (1, 15)]
    assert times[0] > 1.5 * times[1]


@pytest.mark.parametrize("m, count", [(256, 100), (1024, 6), (1025, 46), (2048, 15), (4096, 4), (16384, 1)])
def test_small_matrices_share_the_cache_and_large_ones_fill_waves(predictions, h100, m, count):
    """50 MiB hold 100 times four 256 x 256 ones of two bytes; 16 waves of 132 tiles are 46 times 45, 15 times 136."""
    assert predictions.matrices_together(h100, m, 2) == count


@pytest.mark.parametrize("pairs", [66, 57, 1])
@pytest.mark.parametrize("m, most", [(512, 25), (768, 11), (1024, 6), (1280, 46), (2048, 15), (4096, 4), (16384, 1)])
def test_rounds_of_pairs_are_as_full_as_they_can_be(predictions, h100, m, most, pairs):
    side = math.ceil(m / 256)
    squares = side * (side + 1) // 2
    count = predictions.in_whole_rounds(h100._replace(multiprocessors=2 * pairs), m, most)
    full = {n: n * squares / (math.ceil(n * squares / pairs) * pairs) for n in range(1, most + 1)}
    assert full[count] == max(full.values()) and count == max(n for n in full if full[n] == full[count])


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("m, most", [(128, 400), (512, 25), (768, 11), (1024, 6)])
def test_small_matrices_take_the_least_time_each(predictions, h100, m, most, symmetric):
    count = predictions.in_full_waves(h100, m, most, symmetric)

    def each(n: int) -> float:
        seconds = (
            predictions.symmetric_seconds(h100, n, m, m) if symmetric else predictions.dense_seconds(h100, n, (m,) * 3)
        )
        return seconds / n

    assert each(count) == min(each(n) for n in range(1, most + 1))


def test_where_nothing_is_predicted_as_many_as_there_may_be_are_multiplied(predictions, h100):
    assert predictions.in_full_waves(h100._replace(capability=100), 768, 11, False) == 11
    assert predictions.in_full_waves(h100, predictions.CACHED + 16, 6, True) == 6


def test_the_best_count_is_found_at_once_for_tiny_matrices(kernel, predictions, monkeypatch, h100):
    """The cache holds millions of them; each count that is tried costs the host about a microsecond."""
    tried, dense = [], predictions.dense_seconds
    monkeypatch.setattr(predictions, "dense_seconds", lambda *size: tried.append(size) or dense(*size))
    for m in 1, 8, 64:
        most = predictions.matrices_together(h100, m, 2)
        assert most >= predictions.in_full_waves(h100, m, most, False) >= 0.9 * most
        assert most >= predictions.in_whole_rounds(h100, m, most) >= 0.9 * most
    assert len(tried) <= 3 * 3 * (predictions.WAVES + 1)


def test_each_product_of_squares_gets_full_waves_or_rounds(kernel, predictions, monkeypatch):
    """25 matrices of 512 rows fit into the cache, 22 fill a round of 66 pairs with three squares each.

    16 fill a wave of torch's tiles, 128 of 132; two waves of 10 tiles of the symmetric kernel take 25.
    """
    monkeypatch.setattr(kernel.polar.packing, "gpu_of", lambda device: predictions.Gpu(*H100))
    device, size = torch.device("cuda", 0), (512, 2048)
    iteration = kernel.iteration.choose_iteration(device, torch.float16, size, ((3.4445, -4.775, 2.0315),) * 5)
    names = "torch.bmm", "symmetric_gemm", "hopper_gemm"
    each = [iteration._replace(products=iteration.products._replace(square_name=name)) for name in names]
    assert [kernel.polar.packing.matrices_together(device, size, one) for one in each] == [16, 25, 22]


def test_squares_of_float32_take_twice_the_cache(kernel, predictions, monkeypatch):
    """In the method `gram_float32`, too, whose long matrices take half of that."""
    device, size, counts = torch.device("cuda", 0), (256, 1024), {}
    for method in ("standard", "gram_float32"):
        schedule = kernel.schedules.resolve_schedule("original", 5)
        iteration = kernel.iteration.choose_iteration(device, torch.float16, size, schedule, method)
        for cache in (2**25, 2**26):
            gpu = predictions.Gpu(*H100[:2], cache)
            monkeypatch.setattr(kernel.polar.packing, "gpu_of", lambda device, gpu=gpu: gpu)
            counts[method, cache] = kernel.polar.packing.matrices_together(device, size, iteration)
    assert counts["gram_float32", 2**26] == counts["standard", 2**25] > counts["gram_float32", 2**25]


def test_at_least_one_matrix_is_worked_on(predictions, h100):
    """No four matrices of 1024 rows fit into a cache of 1 MiB, and one of 2**17 rows has more tiles than 16 waves."""
    assert predictions.matrices_together(h100._replace(cache=2**20), 1024, 2) == 1
    assert predictions.matrices_together(h100, 2**17, 2) == 1


def test_a_failed_candidate_ends_predictions_and_a_measurement_holds_for_one_size(kernel, predictions, monkeypatch):
    gains, device = kernel.kernels.speeds.gains, torch.device("cuda", 0)
    monkeypatch.setattr(gains, "gpu_of", lambda device: predictions.Gpu(*H100))
    expected = predictions.predicted_gain(predictions.Gpu(*H100), 4096, 4096) / predictions.WORTH
    assert gains.predicted(device, torch.float16, 4096, 4096) == (expected, "by the model")
    assert gains.predicted(device, torch.float32, 4096, 4096) == gains.Gain()
    with monkeypatch.context() as on_amd:  # whose capabilities have numbers of NVIDIA's
        on_amd.setattr(torch.version, "hip", "6.4")
        assert gains.predicted(device, torch.float16, 4096, 4096) == gains.Gain()
    monkeypatch.setattr(gains, "failed_here", lambda *_: ("128-64-8-8-3-1",))
    assert gains.predicted(device, torch.float16, 4096, 4096) == gains.Gain()
    known = kernel.kernels.speeds.measurements.Known({"m": 512, "k": 2048, "gain": 1.5}, "measured here")
    monkeypatch.setattr(gains, "sizes_here", lambda *_: [known])
    measured = [gains.gain_of(device, torch.float16, "symmetric_gemm", (512, k), None) for k in (2048, 4096)]
    assert measured == [(1.5, "measured here"), gains.Gain()]


def test_a_gain_from_another_machine_says_that_it_is_shipped(kernel, monkeypatch):
    """On a GPU alone: no measurement of a CPU is shipped."""
    gains, asked = kernel.kernels.speeds.gains, []
    monkeypatch.setattr(gains, "key_of", lambda device: None)
    monkeypatch.setattr(gains, "shipped_entries", lambda *of: asked.append(of) or [{"m": 512, "k": 512, "gain": 1.5}])
    for device, expected in (("cuda", (1.5, "shipped")), ("cpu", gains.Gain())):
        assert gains.gain_of(torch.device(device), torch.float16, "symmetric_gemm", (640, 512), None) == expected
    assert asked == [(None, "symmetric_gemm", "float16")]


def test_unknown_gpus_and_small_sizes_are_not_predicted(predictions, h100):
    assert predictions.predicted_gain(h100._replace(capability=100), 4096, 4096) is None
    for gpu in h100, predictions.Gpu(80, 108, 40 * 2**20):
        small = predictions.small_side(gpu.capability)
        assert predictions.predicted_gain(gpu, small, 4096) is None
        assert predictions.predicted_gain(gpu, small + 1, 4096) is not None


def test_the_page_is_what_the_model_says(predictions, repository):
    from tools.pages.predictions import page

    assert (repository / "docs/predictions.md").read_text() == page(predictions)
