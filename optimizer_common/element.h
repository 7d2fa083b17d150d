// The arithmetic of one element, for the host and the device: conversions, momentum, descent, stochastic rounding.
//
// A product that feeds a sum is an explicit fma, so that no compiler is left a choice: all levels of x86-64
// give the same bits, as CUDA should by construction. T is the type computed in, float or double.
#pragma once

#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

// On the host the formulas must be inlined: only then are they compiled for the instruction set of
// each clone of the function that uses them.
#ifdef __CUDACC__
#define OPTIMIZER_INLINE __host__ __device__ __forceinline__
#else
#define OPTIMIZER_INLINE __attribute__((always_inline)) inline
#endif

namespace optimizer {

using torch::headeronly::Half;
using torch::headeronly::ScalarType;

template <class To, class From>
OPTIMIZER_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// The bits a or b, chosen by a mask: GCC makes vectors of masks where it makes none of branches, as for AVX2.
template <class Bits>
OPTIMIZER_INLINE Bits either(bool first, Bits a, Bits b) {
  const Bits mask = -static_cast<Bits>(first);
  return (a & mask) | (b & ~mask);
}

// The float towards zero from x, its last bit set if that is not x itself. Rounding it to half
// precision gives what rounding x would: rounding x to the nearest float first may not.
OPTIMIZER_INLINE float round_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  const double back = nearest;
  uint32_t bits = bits_as<uint32_t>(nearest);
  bits -= std::fabs(back) > std::fabs(x) ? 1 : 0;
  return bits_as<float>(bits | (back != x ? 1 : 0));
}

// float16 as float and back on x86-64, by the arithmetic of torch's class (Maratyszcza's FP16 library), with its bits.
// There a branch chooses between two sums; here masks do.
#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
// Neither sum reads or makes a subnormal float, so that no processor is slow here or flushes one to zero.
OPTIMIZER_INLINE float to_float(Half x) {
  const uint32_t size = static_cast<uint32_t>(x.x) << 17;
  const float normal = bits_as<float>((size >> 4) + (0xE0u << 23)) * 0x1p-112f;
  const float subnormal = bits_as<float>((size >> 17) | (126u << 23)) - 0.5f;
  const bool is_subnormal = size < (1u << 27);
  const uint32_t sign = (static_cast<uint32_t>(x.x) & 0x8000u) << 16;
  return bits_as<float>(sign | either(is_subnormal, bits_as<uint32_t>(subnormal), bits_as<uint32_t>(normal)));
}

// The sum with a power of two rounds to as many bits as float16 keeps of x; the product with 2^112 makes infinity of
// what is too large.
OPTIMIZER_INLINE Half to_half(float x) {
  const uint32_t bits = bits_as<uint32_t>(x), size = bits << 1;
  const uint32_t exponent = std::max(size & 0xFF000000u, 0x71000000u);
  const float rounded = bits_as<float>((exponent >> 1) + 0x07800000u) + std::fabs(x) * 0x1p112f * 0x1p-110f;
  const uint32_t of_rounded = bits_as<uint32_t>(rounded);
  const uint32_t number = ((of_rounded >> 13) & 0x7C00u) + (of_rounded & 0xFFFu);
  const bool is_nan = size > 0xFF000000u;
  return Half(static_cast<uint16_t>((bits >> 16 & 0x8000u) | either(is_nan, 0x7E00u, number)), Half::from_bits());
}
#else
OPTIMIZER_INLINE float to_float(Half x) {
  return static_cast<float>(x);
}

OPTIMIZER_INLINE Half to_half(float x) {
  return static_cast<Half>(x);
}
#endif

template <class T, class Stored>
OPTIMIZER_INLINE T widen(Stored x) {
  if constexpr (std::is_same_v<Stored, Half>) {
    return static_cast<T>(to_float(x));
  } else if constexpr (sizeof(Stored) == 2) {
    return static_cast<T>(static_cast<float>(x));
  } else {
    return static_cast<T>(x);
  }
}

template <class Stored, class T>
OPTIMIZER_INLINE Stored narrow(T x) {
  if constexpr (sizeof(Stored) == 2 && std::is_same_v<T, double>) {
    return narrow<Stored>(round_to_odd(x));
  } else if constexpr (std::is_same_v<Stored, Half>) {
    return to_half(x);
  } else {
    return static_cast<Stored>(x);
  }
}

// lerp(average, value, weight); with Nesterov momentum a second time, from the new average to the gradient.
template <class T>
OPTIMIZER_INLINE T lerp(T average, T value, T weight) {
  return std::fma(weight, value - average, average);
}

enum DecayMode : int64_t { kDecoupled = 0, kIndependent = 1, kCautious = 2 };

template <class T>
struct Descent {
  T keep;  // what decay leaves of a parameter
  T step;
  bool cautious;  // decay only where update and parameter agree in sign
};

template <class T>
OPTIMIZER_INLINE Descent<T> make_descent(double lr, double weight_decay, double multiplier, int64_t mode) {
  const double rate = mode == kIndependent ? 1.0 : lr;
  return {static_cast<T>(std::fma(-rate, weight_decay, 1.0)), static_cast<T>(lr * multiplier), mode == kCautious};
}

template <class T>
OPTIMIZER_INLINE T descend(T parameter, T update, const Descent<T>& by, T row_scale) {
  // Not the sign of the product, which underflows.
  const bool agree = (parameter > 0 && update > 0) || (parameter < 0 && update < 0);
  const T keep = !by.cautious || agree ? by.keep : T(1);
  return row_scale * std::fma(parameter, keep, -(by.step * update));
}

// A float32 number in two halves of 16 bits, which T holds exactly. `upper` is the bfloat16 nearest to it, of two the
// one with the larger absolute value; `remainder` is the lower half of its bits, read as a signed integer. Then its bits
// are those of `upper` plus the remainder. Rounding ties to even instead would need the remainder +2^15.
template <class T>
struct Halves {
  T upper, remainder;
};

// Beside a zero no number has a negative remainder, and beside an infinity none a positive one: somebody else has written
// the upper half since, and the sum would be the bits of a NaN.
template <class T>
OPTIMIZER_INLINE T join(const Halves<T>& halves) {
  const uint32_t upper = bits_as<uint32_t>(static_cast<float>(halves.upper)), magnitude = upper & 0x7FFFFFFFu;
  const int32_t kept = static_cast<int32_t>(halves.remainder);
  const bool stale = (magnitude == 0 && kept < 0) || (magnitude == 0x7F800000u && kept > 0);
  return static_cast<T>(bits_as<float>(upper + static_cast<uint32_t>(stale ? 0 : kept)));
}

// x, rounded to float32 first, in halves. A NaN has remainder 0, and of its bits only that it is one is kept.
template <class T>
OPTIMIZER_INLINE Halves<T> split(T x) {
  const float number = narrow<float>(x);
  const uint32_t bits = either(number != number, 0x7FC00000u, bits_as<uint32_t>(number));
  const float upper = bits_as<float>((bits + 0x8000u) & 0xFFFF0000u);
  return {static_cast<T>(upper), static_cast<T>(static_cast<int16_t>(bits))};
}

// The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
OPTIMIZER_INLINE uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// The odd increment of SplitMix64, 2^64 over the golden ratio.
constexpr uint64_t kIncrement = 0x9E3779B97F4A7C15u;

// Zero is a fixed point of mix: without the increment seed 0 would have key 0, and its first element no random bits.
OPTIMIZER_INLINE uint64_t make_key(int64_t seed) {
  return mix(static_cast<uint64_t>(seed) + kIncrement);
}

// Random bits of an element: a function of its matrix's seed, by way of its key, and of its index
// in the whole matrix, so that neither order nor sharding matters.
OPTIMIZER_INLINE uint64_t random_bits(uint64_t key, uint64_t index) {
  return mix(key + index * kIncrement);
}

// How the numbers of a half-precision dtype lie among those of T.
template <class T>
struct Grid {
  int dropped;  // mantissa bits of T that the dtype lacks
  T smallest_normal;
};

template <class T>
OPTIMIZER_INLINE Grid<T> make_grid(ScalarType dtype) {
  constexpr int mantissa = sizeof(T) == 4 ? 23 : 52;
  if (dtype == ScalarType::BFloat16) {
    return {mantissa - 7, T(0x1p-126)};
  }
  return {mantissa - 10, T(0x1p-14)};
}

// x rounded to one of its two neighbours on the grid, up with probability its distance from the lower
// one over their spacing: as many random bits as the grid drops are added to the bits of |x|, the rest cut.
// A random number of exactly that many bits makes this unbiased: P(up) = fraction, which is a multiple of it.
template <class T>
OPTIMIZER_INLINE T round_stochastically(T x, uint64_t random, const Grid<T>& grid) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  const T size = std::fabs(x);
  // Below the smallest normal number the spacing stays what it is just above, so round up there.
  const T shift = size < grid.smallest_normal ? grid.smallest_normal : T(0);
  const Bits bits = bits_as<Bits>(size + shift) + static_cast<Bits>(random >> (64 - grid.dropped));
  const T rounded = bits_as<T>(static_cast<Bits>(bits >> grid.dropped << grid.dropped)) - shift;
  const bool is_finite = size <= std::numeric_limits<T>::max();
  return bits_as<T>(either(is_finite, bits_as<Bits>(std::copysign(rounded, x)), bits_as<Bits>(x)));
}

}  // namespace optimizer
