// Momentum in 8 bits: neighbours in a row share a scale as a block, and each has a code, an integer from -127 to 127.
//
//     value = scale code |code|           scale = max |x| / 127^2 over the block, in float32
//
// Squares lie closer where they are small, as a block has columns of small gradients beside those of large ones: an
// average that moves by less than half the spacing would stay where it is for ever. Next to zero that spacing is
// M / 127^2, where equal steps would have M / 127. The code is the nearest, so that
//
//     |value - x| <= sqrt(M |x|) / 127 + M / (4 127^2) <= M / 126          M = max |x| over the block
//
// but for a few roundings of T. In a block with a NaN or an infinity all values are NaN; numbers that float32 cannot
// hold are infinities here. Sources: Dettmers et al., 8-bit optimizers via block-wise quantization, arXiv:2110.02861;
// companding of momentum: Gonzalez Ortiz et al., FlashOptim, arXiv:2602.23349.
#pragma once

#include "matrices.h"

namespace optimizer {

// The scales take a 16th of what the codes take. A tile holds whole blocks, however it is cut.
constexpr int64_t kMomentumBlock = 64;
static_assert(kTileSide % kMomentumBlock == 0 && kTileArea % kMomentumBlock == 0);

constexpr int kLargestCode = 127;

// |x| as an integer: in the order of numbers, with NaN above all.
template <class T>
using Magnitude = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;

template <class T>
OPTIMIZER_INLINE Magnitude<T> magnitude(T x) {
  return bits_as<Magnitude<T>>(std::fabs(x));
}

// The scale of a block whose largest magnitude this is: a normal number, so that it divides to full accuracy.
template <class T>
OPTIMIZER_INLINE float make_scale(Magnitude<T> largest) {
  const float scale = static_cast<float>(bits_as<T>(largest) / T(kLargestCode * kLargestCode));
  return scale < 0x1p-126f ? 0x1p-126f : scale;
}

// The integer nearest to the square root of x from 0 to 2^14, by two of Newton's steps from 1 / sqrt(x) within 3.5 %:
// the root is within 5e-6 of itself. Compilers vectorise it wherever fma is an instruction, but std::sqrt not, as that
// may set errno.
OPTIMIZER_INLINE int32_t nearest_root(float x) {
  float inverse = bits_as<float>(0x5F3759DFu - (bits_as<uint32_t>(x) >> 1));
  for (int step = 0; step < 2; ++step) {
    inverse *= std::fma(-0.5f * x * inverse, inverse, 1.5f);
  }
  return static_cast<int32_t>(std::fma(x, inverse, 0.5f));
}

// The code of x, as a T; 0 where there is no such number.
template <class T>
OPTIMIZER_INLINE T quantize(T x, T scale) {
  const float square = static_cast<float>(std::fabs(x) / scale);
  const uint32_t root_of = either(square <= 0x1p14f, bits_as<uint32_t>(square), 0u);  // of NaN it is that of zero
  return std::copysign(static_cast<T>(nearest_root(bits_as<float>(root_of))), x);
}

// The product feeds the difference in `lerp`: an fma that adds nothing leaves compilers no choice there.
template <class T>
OPTIMIZER_INLINE T dequantize(T code, T scale) {
  return std::fma(scale, code * std::fabs(code), T(-0.0));
}

// Where the scale of the block is that has this element.
OPTIMIZER_INLINE float* scale_of(const View& scales, int64_t row, int64_t col) {
  return reinterpret_cast<float*>(address(scales, ScalarType::Float, row, col / kMomentumBlock));
}

}  // namespace optimizer
