// Prints how many of a block's sums the code for AVX-512 and that for AVX2 compute differently, both run with AVX2.
#define OPTIMIZER_AVX512F __attribute__((target("avx2,fma")))
#include "../../optimizer_cpu/gemm_float32.h"

#include <algorithm>
#include <cstdio>
#include <random>

using namespace optimizer;

constexpr int kMostSteps = 3;

int main() {
  alignas(64) static float a[kMostSteps * kBlockArea], b[kMostSteps * kBlockArea];
  alignas(64) static float sums[2][kBlockArea];
  std::mt19937 lot(0);
  std::normal_distribution<float> normal;
  for (float* each : {a, b}) {
    std::generate_n(each, kMostSteps * kBlockArea, [&] { return normal(lot); });
  }
  int different = 0;
  for (int steps = 1; steps <= kMostSteps; ++steps) {
    for (const bool first : {true, false}) {  // the second time sums are added to those before
      float32::accumulate_avx2(sums[0], a, b, steps, first);
      float32::accumulate_avx512(sums[1], a, b, steps, first);
      for (int i = 0; i < kBlockArea; ++i) {
        different += sums[0][i] != sums[1][i] || sums[0][i] == 0;
      }
    }
  }
  std::printf("%d\n", different);
}
