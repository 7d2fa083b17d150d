// Sums of products with AMX: four tiles of C, two of A and two of B fill the eight tile registers.
#pragma once

#if defined(__x86_64__)

#include "gemm_avx512.h"

#include <sys/syscall.h>
#include <unistd.h>

#define OPTIMIZER_AMX __attribute__((target("amx-tile,amx-bf16")))

namespace optimizer::amx {

// Linux gives the tile registers to processes that ask for them; asking again is harmless.
inline bool permitted() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

inline bool available() {
  static const bool is = avx512::available() && __builtin_cpu_supports("amx-tile") &&
                         __builtin_cpu_supports("amx-bf16") && permitted();
  return is;
}

// Operand of the instruction that configures the tiles.
struct alignas(64) Tiles {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Not a local variable: the compiler believes that the intrinsic reads only the first bytes, and may drop the others.
constexpr Tiles kTiles;

// Other libraries configure the tiles of a thread once and rely on finding them unchanged.
OPTIMIZER_AMX inline void enter(TileState& before) {
  _tile_storeconfig(before.bytes);
  _tile_loadconfig(&kTiles);
}

OPTIMIZER_AMX inline void leave(const TileState& before) {
  if (before.bytes[0] == 0) {
    _tile_release();
  } else {
    _tile_loadconfig(before.bytes);
  }
}

OPTIMIZER_AMX inline void accumulate(float* sums, const BFloat16* a, const BFloat16* b, int64_t steps, bool first) {
  constexpr int64_t kSums = kTile * kTile, kNumbers = kTile * kBlockSide, kRowBytes = 64;
  // The compiler does not know that the loading intrinsics read memory.
  asm volatile("" ::: "memory");
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, kRowBytes);
    _tile_loadd(1, sums + kSums, kRowBytes);
    _tile_loadd(2, sums + 2 * kSums, kRowBytes);
    _tile_loadd(3, sums + 3 * kSums, kRowBytes);
  }
  for (int64_t step = 0; step < steps; ++step, a += kBlockArea, b += kBlockArea) {
    _tile_loadd(4, a, kRowBytes);
    _tile_loadd(6, b, kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + kNumbers, kRowBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + kNumbers, kRowBytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, kRowBytes);
  _tile_stored(1, sums + kSums, kRowBytes);
  _tile_stored(2, sums + 2 * kSums, kRowBytes);
  _tile_stored(3, sums + 3 * kSums, kRowBytes);
  asm volatile("" ::: "memory");
}

constexpr Instructions<BFloat16> kInstructions{.name = "amx",
                                              .sizes = {10, 8, 16, 4096, 256},
                                              .available = available,
                                              .enter = enter,
                                              .leave = leave,
                                              .arrange_a = {avx512::transpose, avx512::copy_rows},
                                              .arrange_b = {avx512::interleave, avx512::arrange_columns},
                                              .accumulate = accumulate,
                                              .finish = avx512::finish,
                                              .finish_in_float32 = float32::finish};

}  // namespace optimizer::amx

#endif
