"""Products with AMX leave the tiles of a thread as they were configured."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from tests.support.gemm_kinds import BFLOAT16, Kind


@pytest.fixture
def tile_configuration(native):
    """Functions that load and store this thread's configuration of AMX, 64 bytes: ldtilecfg and sttilecfg [rdi]."""
    if native.gemm_instructions(BFLOAT16) != "amx":
        pytest.skip("this processor has no amx")
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(bytes.fromhex("c4e2784907c3" + "c4e2794907c3"))
    start = ctypes.addressof(ctypes.c_char.from_buffer(code))
    load, store = (ctypes.CFUNCTYPE(None, ctypes.c_char_p)(start + 6 * i) for i in range(2))
    yield load, store
    load(bytes(64))


@pytest.mark.parametrize("palette", [0, 1])
def test_the_tiles_of_a_thread_stay_as_they_were_configured(native, tile_configuration, palette):
    load, store = tile_configuration
    config, buffer = bytearray(64), ctypes.create_string_buffer(64)
    config[0], config[16], config[48] = palette, 48 * palette, 5 * palette  # one tile of 5 rows of 48 bytes, or none
    X = Kind(BFLOAT16, "amx", BFLOAT16).random(3, 100, 100)
    load(bytes(config))
    native.gemm_(torch.empty_like(X), X, X, None, 1.0, 0.0, False, "amx")
    store(ctypes.cast(buffer, ctypes.c_char_p))
    assert buffer.raw == config
