"""Launches: the configuration measured nearest, safe ones where nothing was measured, and how operands are read."""

from __future__ import annotations

import contextlib
import itertools
import json

import pytest
import torch

pytest.importorskip("triton")

FIELDS = {"tile": 128, "tile_k": 64, "group": 4, "warps": 8, "stages": 3, "sections": 1, "gain": 1.2}
FLAGS = False, True


@pytest.fixture(scope="module")
def measurements(kernel):
    return kernel.kernels.speeds.measurements


@pytest.fixture(scope="module")
def module(kernel):
    return kernel.kernels.gpu.symmetric_gemm


@pytest.fixture
def entries(measurements, monkeypatch) -> list[dict]:
    """What was measured on "a GPU" in bfloat16, each with a group of its own."""
    sizes = [(256, 256), (1024, 1024), (1024, 8192)]
    shipped_entries = [{"m": m, "k": k, **FIELDS, "group": group} for group, (m, k) in enumerate(sizes)]
    table = {"symmetric_gemm": {"bfloat16": shipped_entries}}
    monkeypatch.setattr(measurements, "shipped", lambda name: (name, table if name == "a GPU" else {}))
    return shipped_entries


@pytest.mark.parametrize(
    "m, k, expected",
    [(1, 1, 0), (500, 500, 0), (530, 530, 1), (1024, 2800, 1), (1024, 3000, 2), (10**6, 10**6, 2), (0, 0, 0)],
)
def test_nearest_entry_has_the_smallest_size_ratios(tuned, entries, m, k, expected):
    """Half way between 256 and 1024 is 512, and between 1024 and 8192 it is 2896."""
    assert tuned.nearest("a GPU", torch.bfloat16, m, k) is entries[expected]


def test_both_ratios_count_and_not_their_sum(measurements):
    """Eight times as long in one side is less than three times in both."""
    entries = [(64, 512, "long"), (192, 192, "large")]
    assert measurements.nearest_of(entries, 64, 64) == "long"


def test_what_was_measured_here_counts_for_its_own_size_before_what_ships(measurements):
    here, shipped = [(64, 64, "first"), (64, 512, "second")], [(64, 512, "shipped"), (512, 512, "large")]
    choices = [measurements.exact_or_nearest(here, shipped, 64, k) for k in (64, 512, 500)]
    assert choices == ["first", "second", "shipped"] and measurements.exact_or_nearest(here, [], 64, 500) is None


def test_unmeasured_device_or_dtype_has_no_entry(tuned, entries):
    assert tuned.nearest("another GPU", torch.bfloat16, 256, 256) is None
    assert tuned.nearest("a GPU", torch.float16, 256, 256) is None


def test_measured_config_is_chosen_for_aligned_operands_only(tuned, entries):
    target = tuned.Target("cuda", 80)  # where 500 rows are few, and 1024 are not
    for name, dtype, aligned in itertools.product(
        ("a GPU", "another GPU"), (torch.bfloat16, torch.float16), (True, False)
    ):
        chosen = tuned.chosen_config(name, target, dtype, (500, 1024), (True, aligned))
        safe = tuned.safe_config(target, dtype, 500, True, aligned)
        was_measured = (name, dtype, aligned) == ("a GPU", torch.bfloat16, True)
        assert chosen == (tuned.Config(128, 64, 1, 8, 3) if was_measured else safe)


def test_measurements_are_read_from_the_devices_file(measurements, monkeypatch, tmp_path):
    table = {"bfloat16": [{"m": 1, "k": 1, **FIELDS}]}
    (tmp_path / "NVIDIA_Some_GPU.json").write_text(json.dumps({"symmetric_gemm": table}))
    monkeypatch.setattr(measurements, "_CONFIGS", tmp_path)
    read = measurements.shipped.__wrapped__
    assert read("NVIDIA Some GPU") == ("NVIDIA Some GPU", {"symmetric_gemm": table})
    assert read("NVIDIA Other GPU") == ("", {})


@pytest.mark.parametrize(
    "here, expected",
    [((90, 132), "NVIDIA H200"), ((90, 114), ""), ((90, 78), "NVIDIA Half"), ((80, 132), ""), (None, "")],
)
def test_a_gpu_without_a_file_takes_its_likes(measurements, monkeypatch, tmp_path, here, expected):
    """An H100 or a GH200 has the multiprocessors of an H200; of 114 there is nothing within a tenth."""
    for name, count in (("NVIDIA H200", 132), ("NVIDIA H201", 140), ("NVIDIA Half", 80)):
        content = {"device": name, "capability": 90, "multiprocessors": count, "symmetric_gemm": {}}
        (tmp_path / f"{name.replace(' ', '_')}.json").write_text(json.dumps(content))
    (tmp_path / "Old_Format.json").write_text(json.dumps({"device": "Old Format", "capability": 90}))
    monkeypatch.setattr(measurements, "_CONFIGS", tmp_path)
    monkeypatch.setattr(measurements, "multiprocessors", lambda name: here)
    assert measurements.shipped.__wrapped__("NVIDIA H100 80GB HBM3")[0] == expected


@pytest.mark.parametrize("hip, target", [(None, ("cuda", 89)), ("7.0", ("hip", 0))])
def test_kernels_are_compiled_for_the_capability_of_a_gpu(tuned, monkeypatch, hip, target):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert tuned.target_of(torch.device("cuda", 0)) == target


@pytest.mark.parametrize("m", [64, 4096])
@pytest.mark.parametrize("target", [("cuda", 80), ("cuda", 90), ("hip", 0)], ids=str)
def test_float32_has_small_tiles_everywhere_and_no_others_compete(tuned, target, m):
    target = tuned.Target(*target)
    for lie in itertools.product((True, False), repeat=2):
        assert tuned.safe_config(target, torch.float32, m, *lie).tile == 32
    assert tuned.usual_configs(target, torch.float32) == tuned.usual_small_configs(target, torch.float32, 64) == []


def test_safe_configs_can_be_launched(tuned):
    """Triton needs powers of two, and a dot product 16 or more on each side."""
    targets = [tuned.Target("cuda", capability) for capability in (80, 86, 89, 90, 100, 103, 120)]
    dtypes = torch.float16, torch.bfloat16, torch.float32
    for choice in itertools.product([*targets, tuned.Target("hip", 0)], dtypes, (1, 768, 769, 10**5), FLAGS, FLAGS):
        config = tuned.safe_config(*choice)
        powers = config.tile, config.tile_k, config.warps
        assert all(number & (number - 1) == 0 for number in powers) and min(powers[:2]) >= 16
        assert min(config.group, config.stages, config.warps) >= 1


def test_usual_configs_are_powers_of_two_and_compete_once_each(tuned):
    targets = [tuned.Target("cuda", capability) for capability in (75, 80, 90, 100, 103, 110, 120)]
    for target in [*targets, tuned.Target("hip", 0)]:
        usual = tuned.usual_configs(target, torch.float16)
        assert len({*usual}) == len(usual) > 1
        assert {*tuned.COMPILED} & {*usual} == {*(tuned.COMPILED if target.capability == 90 else ())}
        assert tuned.usual_configs(target, torch.float32) == []
        for config in {*usual} - {*tuned.COMPILED}:
            assert all(number & (number - 1) == 0 for number in config[:4]) and min(config[:2]) >= 16
            assert config.tile <= 256 and config.stages >= 2


# Compute capabilities whose blocks have as much shared memory as those of a linted target.
LIKE = {"sm_80": (80,), "sm_90": (90,), "sm_100": (100, 103, 110), "sm_120": (86, 89, 120), "gfx942": ()}


@pytest.mark.parametrize("gpu", LIKE)
def test_panels_on_their_way_fit_into_shared_memory(tuned, gpu):
    """A stage is a panel of each operand, 2 bytes a number. On AMD's GPUs one of the stages is in registers."""
    from tools.lint.judgements import LIMITS  # which needs Triton

    for target in [tuned.Target("cuda", capability) for capability in LIKE[gpu]] or [tuned.Target("hip", 0)]:
        safe = [tuned.safe_config(target, torch.float16, *case) for case in itertools.product((1, 4096), *2 * [FLAGS])]
        for config in {*safe, *tuned.usual_configs(target, torch.float16)} - {*tuned.COMPILED}:
            panels = 2 * (min(config.tile, 128) + config.tile) * config.tile_k
            assert (config.stages - (target.backend == "hip")) * panels <= LIMITS[gpu].shared, (target, config)


def test_tiles_are_large_above_the_small_side_of_the_model(kernel, tuned):
    """The model predicts no gain up to there. Narrow loads and stores leave no registers for large ones."""
    for capability, descriptors in itertools.product((80, 89, 90, 100, 120), FLAGS):
        side, target = kernel.kernels.speeds.predictions.small_side(capability), tuned.Target("cuda", capability)
        chosen = [tuned.safe_config(target, torch.float16, m, descriptors, True) for m in (side, side + 1)]
        assert [config.tile for config in chosen] == [64, 128]
        assert tuned.safe_config(target, torch.float16, side + 1, descriptors, False).tile == 64


def test_small_configs_pad_to_whole_panels(tuned):
    """Triton needs powers of two, and a dot product 16 or more on each side; panels and sums must end with a square."""
    targets = [tuned.Target("cuda", capability) for capability in (80, 90, 100, 120)] + [tuned.Target("hip", 0)]
    for target, dtype, m in itertools.product(targets, (torch.float16, torch.bfloat16, torch.float32), range(1, 129)):
        side = tuned.padded_side(m)
        assert m <= side < max(2 * m, 17)
        for config in tuned.safe_small_config(target, dtype, m), *tuned.usual_small_configs(target, dtype, side):
            assert config.side == side and config.on_chip in (0, 1) and config.stages >= 1
            assert all(number & (number - 1) == 0 for number in config[:4]) and min(config[:3]) >= 16
            assert side % config.width == 0 == side % config.depth


def test_small_configs_compete_once_each(tuned):
    for target, side in itertools.product((tuned.Target("cuda", 90), tuned.Target("hip", 0)), tuned.PADDED_SIDES):
        usual = tuned.usual_small_configs(target, torch.bfloat16, side)
        assert len({*usual}) == len(usual) > 1
        assert {config.on_chip for config in usual} == ({0, 1} if target.backend == "cuda" and side < 128 else {0})


@pytest.fixture
def launches(module, monkeypatch) -> list:
    """The launches that the operation asks for on "a GPU", each after the device that was current then."""
    calls, current = [], [None]

    @contextlib.contextmanager
    def device(wanted):
        current.append(wanted)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(module, "launch_symmetric_gemm", lambda *args: calls.append((current[-1], *args)))
    return calls


def test_launch_is_on_the_operands_device(module, launches):
    A, C = torch.ones(1, 3, 2), torch.empty(1, 3, 3)
    module._on_gpu(A, A.mT, None, C, 2.0, 0.5, -1.0)
    ((device, *_, result, scalars, _),) = launches
    assert device == A.device and result is C
    assert scalars == (2.0, 0.5, -1.0)


@pytest.mark.parametrize("name", [None, "A", "B", "C", "D"])
def test_unaligned_operand_takes_no_measured_config(module, launches, entries, name):
    values = {operand: torch.zeros(1, 64, 64, dtype=torch.bfloat16) for operand in "ABDC"}
    if name:
        values[name] = torch.zeros(64 * 64 + 1, dtype=torch.bfloat16)[1:].view(1, 64, 64)
    scalars = dict.fromkeys(("alpha", "beta", "diagonal"), 0.0)
    module._on_gpu(**values, **scalars)
    was_measured = launches[0][-1] == tuple(entries[0][field] for field in module.Config._fields)
    assert was_measured == (name is None)


def test_descriptors_need_panels_the_hardware_can_address(module):
    X = torch.zeros(2, 32, 16, dtype=torch.float16)
    for panel in X, X.mT, X[:, 1:, 8:], X[:, :31]:
        assert module.fits_descriptor(panel)
    odd = torch.zeros(2, 32, 17, dtype=torch.float16)
    for panel in odd, odd.mT, X[..., 1:], X[..., ::2], X[:1].expand(2, 32, 16), X[..., :0], X[:0], X[:, :0]:
        assert not module.fits_descriptor(panel)


def test_small_configs_are_chosen_by_padded_rows(tuned, measurements, monkeypatch):
    target = tuned.Target("cuda", 90)
    entry = {"m": 60, "k": 256, "side": 64, "width": 32, "depth": 64, "warps": 8, "stages": 3}
    entry |= {"on_chip": 0, "gain": 1.5}
    table = {"small_polar": {"float16": [entry]}}
    monkeypatch.setattr(measurements, "shipped", lambda name: (name, table if name == "a GPU" else {}))
    for name, m, measured in (("a GPU", 64, True), ("a GPU", 33, True), ("a GPU", 128, False), ("another", 64, False)):
        chosen = tuned.chosen_small_config(name, target, torch.float16, (m, 256))
        safe = tuned.safe_small_config(target, torch.float16, m)
        assert chosen == (tuned.SmallConfig(64, 32, 64, 8, 3, 0) if measured else safe), (name, m)
