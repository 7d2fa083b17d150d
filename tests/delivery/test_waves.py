"""Waves of blocks are counted exactly."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tools.lint import judgements, waves


@pytest.mark.parametrize(
    ("m", "symmetric", "dense"), [(1024, (36, 1, 27), (64, 1, 48)), (2048, (136, 2, 3), (256, 2, 94))]
)
def test_symmetry_saves_no_wave_of_small_results(m, symmetric, dense):
    """132 multiprocessors with one tile of 128 each."""
    for half, (tiles, count, percent) in ((True, symmetric), (False, dense)):
        launch = waves.waves(waves.tiles(m, 128, half), 132)
        assert (launch.tiles, launch.count, round(100 * launch.last_use)) == (tiles, count, percent)
    assert waves.saves_waves(m, 128, 132) == 0


def test_symmetry_halves_the_waves_of_large_results():
    assert waves.waves(waves.tiles(4096, 128, True), 132) == (528, 4, Fraction(1))
    assert waves.waves(waves.tiles(4096, 128, False), 132).count == 8
    assert waves.saves_waves(4096, 128, 132) == 4


def test_the_last_wave_may_have_less_work():
    assert waves.waves(136, 132) == (136, 2, Fraction(4, 132))
    assert waves.waves(132, 132) == (132, 1, Fraction(1))


def test_batching_saves_waves_one_matrix_does_not():
    # Two matrices have 72 and 128 tiles, one wave each; three have 108 and 192, one wave and two.
    assert [waves.saves_waves(1024, 128, 132, batch) for batch in (1, 2, 3)] == [0, 0, 1]
    assert waves.smallest_saving_batch(1024, 128, 132) == 3
    assert waves.smallest_saving_batch(128, 128, 132) is None, "one tile has no mirror"


def test_blocks_per_sm_follow_the_scarcest_resource():
    limits = judgements.LIMITS["sm_90"].shared_of_sm
    assert waves.blocks_per_sm(131104, 90, 8, limits) == 1
    assert waves.blocks_per_sm(65568, 58, 4, limits) == 3
    assert waves.blocks_per_sm(8192, 253, 8, limits) == 1
