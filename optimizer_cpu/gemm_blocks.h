// What a product is made of: blocks of C, the packed order of the operands, and what an instruction set provides.
//
// A block of C is 32 x 32. For a panel, 32 rows of A or 32 columns of B, the sum over k goes in steps of 32: each step
// is one block of the operand, packed in the order in which it is multiplied, zeros where the operand ends.
//
//     A            32 rows of 32 k each
//     B, float32   for each k 32 columns
//     B, bfloat16  two tiles of 16 columns: 16 pairs of k, each with 16 columns of (k, k + 1)
//     C            four tiles of 16 x 16 float32, row by row, whatever the result will be
#pragma once

#include "gemm.h"

#include <cstring>

namespace optimizer {

constexpr int64_t kBlockSide = 32;
constexpr int64_t kTile = 16;
constexpr int64_t kBlockArea = kBlockSide * kBlockSide;

// What is done with the sums of a block.
template <class Result>
struct Epilogue {
  float alpha, beta;
  bool symmetric;
  Result* c;
  const Result* d;  // null where there is none
  int64_t c_stride, d_stride;
};

// The tile configuration of a thread before the product, as the processor stores it.
struct alignas(64) TileState {
  uint8_t bytes[64];
};

// Packs a block of an operand; `stride` elements from run to run.
template <class Element>
using Arrange = void (*)(Element* to, const Element* from, int64_t stride);

template <class Result>
using Finish = void (*)(float* sums, const Epilogue<Result>& epilogue, const Box& box);

// How much of a product a core works on at once, in blocks: as much as its caches hold.
struct Sizes {
  int64_t steps;       // of k in one go: a panel of A that long stays in the nearest cache while panels of B pass
  int64_t rows, cols;  // whose sums stay in the second-level cache from one go to the next
  int64_t whole;       // blocks of B that are packed at once for all of k; where there are more, each go packs its own
  int64_t grain;       // blocks that take as long as it takes to wake another thread
};

template <class Element>
struct Instructions {
  const char* name;
  Sizes sizes;
  bool (*available)();
  // Called on each thread before its first product and after its last.
  void (*enter)(TileState& before) = [](TileState&) {};
  void (*leave)(const TileState& before) = [](const TileState&) {};
  Arrange<Element> arrange_a[2], arrange_b[2];  // [whether runs are along k]
  // sums += A B over so many steps; from zero where `first`.
  void (*accumulate)(float* sums, const Element* a, const Element* b, int64_t steps, bool first);
  // Results from sums, which are changed on the way.
  Finish<Element> finish;
  Finish<float> finish_in_float32 = nullptr;  // where Element is another type

  template <class Result>
  Finish<Result> finish_as() const {
    if constexpr (std::is_same_v<Result, Element>) {
      return finish;
    } else {
      return finish_in_float32;
    }
  }
};

// Where the number in this row and column of a block is among its sums.
OPTIMIZER_INLINE int64_t place_of_sum(int64_t row, int64_t col) {
  return (row / kTile * 2 + col / kTile) * kTile * kTile + row % kTile * kTile + col % kTile;
}

template <class Element>
OPTIMIZER_INLINE void copy_block(Element* to, int64_t to_stride, const Element* from, int64_t from_stride,
                                 const Box& box) {
  for (int64_t row = 0; row < box.rows; ++row, to += to_stride, from += from_stride) {
    if (box.cols == kBlockSide) {
      std::memcpy(to, from, kBlockSide * sizeof(Element));
    } else {
      std::memcpy(to, from, box.cols * sizeof(Element));
    }
  }
}

// sums = alpha sums + beta D, or alpha sums where there is no D.
template <class Result>
OPTIMIZER_INLINE void scale(float* sums, const Epilogue<Result>& by, const Box& box) {
  if (by.alpha != 1) {
    for (int64_t i = 0; i < kBlockArea; ++i) {
      sums[i] *= by.alpha;
    }
  }
  if (by.d) {
    alignas(64) Result padded[kBlockArea];
    const Result* d = by.d + box.row * by.d_stride + box.col;
    int64_t stride = by.d_stride;
    if (box.rows < kBlockSide || box.cols < kBlockSide) {
      std::memset(static_cast<void*>(padded), 0, sizeof(padded));
      copy_block(padded, kBlockSide, d, stride, box);
      d = padded;
      stride = kBlockSide;
    }
    for (int64_t i = 0; i < 2 * kBlockSide; ++i) {
      const int64_t row = i / 2, col = i % 2 * kTile;
      for (int64_t lane = 0; lane < kTile; ++lane) {
        float& sum = sums[place_of_sum(row, col) + lane];
        sum = std::fma(by.beta, widen<float>(d[row * stride + col + lane]), sum);
      }
    }
  }
}

// Writes a block from its sums, and its mirror if the result is symmetric; on the diagonal the lower half is mirrored
// in place. round(to, sums) rounds them to rows of 32, transpose(to, from, stride) is of 32 x 32.
template <class Result, class Round, class Transpose>
OPTIMIZER_INLINE void finish_block(float* sums, const Epilogue<Result>& by, const Box& box, Round round,
                                   Transpose transpose) {
  alignas(64) Result block[kBlockArea], mirror[kBlockArea];
  scale(sums, by, box);
  round(block, sums);
  Result* const c = by.c + box.row * by.c_stride + box.col;
  if (!by.symmetric) {
    return copy_block(c, by.c_stride, block, kBlockSide, box);
  }
  transpose(mirror, block, kBlockSide);
  if (box.row == box.col) {
    for (int64_t row = 0; row < kBlockSide; ++row) {
      const int64_t right = row * kBlockSide + row + 1;
      std::memcpy(static_cast<void*>(block + right), mirror + right, (kBlockSide - row - 1) * sizeof(Result));
    }
  } else {
    const Box mirrored{box.col, box.row, box.cols, box.rows};
    copy_block(by.c + box.col * by.c_stride + box.row, by.c_stride, mirror, kBlockSide, mirrored);
  }
  copy_block(c, by.c_stride, block, kBlockSide, box);
}

}  // namespace optimizer
