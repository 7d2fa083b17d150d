// How a warp group writes its part of a tile: alpha sum + beta D, plus a number on the diagonal, and the mirror image.
//
// A part has kPartRows rows and the columns of a tile. It is written in pieces of kPiece x kPiece: rounded, laid out in a
// buffer of shared memory as it is and once more transposed, and stored from there by TMA. A piece above the diagonal is
// left out, as it is another one's mirror image; one on the diagonal takes its own lower half for both halves.
//
// What only the device can do is asked of a `Machine`, one for each thread:
//
//     issues()                              whether this thread of its warp group starts the stores and waits for them
//     sync()                                waits for all threads of the warp group
//     wait_for_buffer()                     waits until at most kBuffers - 1 stores still read shared memory
//     put_matrices<transposed>(buffer, place, values)
//                                           four matrices of 8 x 8, whose row i starts in the buffer where `place` tells
//                                           for matrix and row; a thread of a warp holds two neighbours of each
//     put(buffer, place, value)             one element
//     publish()                             makes what this thread has put visible to stores
//     store(buffer, matrix, row, col)       starts to store a piece, clipped to the result
//     round(low, high), widen(pair, i)      between float32 and pairs of the result's elements
//
// Stores run on after `store` returns, and read the buffer late. The order of the waits is what keeps it whole:
// tests/hopper_model runs this file with stores that read at any time until they are waited for.
#pragma once

#include "../../optimizer_common/hopper_gemm.h"

namespace optimizer::hopper {

constexpr int kTileRows = 128, kTileCols = 256;  // of a block; a cluster's two blocks make a square
constexpr int kPartRows = 64;                    // of a warp group: its products have 64 rows
constexpr int kGroupThreads = 128;
constexpr int kPiece = 64;  // 128 bytes: as wide as TMA swizzles
constexpr int kPieces = kTileCols / kPiece;
constexpr int kPieceBytes = kPiece * kPiece * 2;
constexpr int kBuffers = 2;  // of a warp group: one is filled while the other is read
constexpr int kSums = kPartRows * kTileCols / kGroupThreads;
constexpr int kPieceSums = kSums / kPieces;

// What a call makes of the sums; strides count elements, and D may be null.
struct Result {
  int m;
  float alpha, beta, diagonal;
  const uint16_t* d;
  int64_t d_matrix, d_row;
};

inline Result result_of(const HopperGemm& call) {
  return {static_cast<int>(call.m), call.alpha, call.beta, call.diagonal,
          reinterpret_cast<const uint16_t*>(call.d.data), call.d.matrix_stride, call.d.run_stride};
}

// The part of a warp group: its matrix, its first row, the first column of its tile.
struct Part {
  int matrix, row, col;
};

// Two blocks share a square, and two warp groups each block, from the top down.
OPTIMIZER_INLINE Part part_of(const Square& square, int block, int group) {
  return {square.matrix, square.row * kSquare + block * kTileRows + group * kPartRows, square.col * kSquare};
}

// Where sum i of a thread stands in its warp group's part: as the products of 64 rows leave them.
OPTIMIZER_INLINE constexpr int row_of_sum(int thread, int i) {
  return thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
}
OPTIMIZER_INLINE constexpr int col_of_sum(int thread, int i) {
  return i / 4 * 8 + thread % 4 * 2 + i % 2;
}

// The byte of a buffer where 8 elements of a row begin: TMA's swizzle of 128 bytes.
OPTIMIZER_INLINE constexpr int place_of(int row, int eight) {
  return row * (kPiece * 2) + (eight ^ row % 8) * 16;
}
OPTIMIZER_INLINE constexpr int place_of_element(int row, int col) {
  return place_of(row, col / 8) + col % 8 * 2;
}

// What a thread holds of a piece: pairs of neighbours in a row, two rows for each 8 columns.
struct Pairs {
  uint32_t at[kPiece / 8][2];
};

// The sums from which a thread makes a piece's pairs.
struct PieceSums {
  float at[kPieceSums];
};

// A piece's elements of D; zeros where there is no D.
template <class Machine>
OPTIMIZER_INLINE Pairs load_addend(const Machine& machine, const Result& result, const Part& part, int col) {
  Pairs pairs{};
  if (!result.d) {
    return pairs;
  }
  const uint16_t* const matrix = result.d + part.matrix * result.d_matrix;
#pragma unroll
  for (int i = 0; i < kPieceSums; i += 2) {
    const int row = part.row + row_of_sum(machine.thread(), i), place = col + col_of_sum(machine.thread(), i);
    if (row < result.m && place < result.m) {  // m is even, so that a neighbour is in it too
      pairs.at[i / 4][i / 2 % 2] = *reinterpret_cast<const uint32_t*>(matrix + row * result.d_row + place);
    }
  }
  return pairs;
}

// The finished elements of a piece from its sums and its elements of D.
template <class Machine>
OPTIMIZER_INLINE Pairs finish(const Machine& machine, const Result& result, const Part& part, int col,
                              const PieceSums& sums, Pairs pairs) {
#pragma unroll
  for (int i = 0; i < kPieceSums; i += 2) {
    uint32_t& pair = pairs.at[i / 4][i / 2 % 2];
    float values[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      values[e] = result.alpha * sums.at[i + e];
      if (result.d) {
        values[e] = fmaf(result.beta, machine.widen(pair, e), values[e]);
      }
      if (part.row == col && row_of_sum(machine.thread(), i) == col_of_sum(machine.thread(), i + e)) {
        values[e] += result.diagonal;
      }
    }
    pair = machine.round(values[0], values[1]);
  }
  return pairs;
}

// Fills the next buffer by `fill(buffer)` and starts to store it at (row, col).
template <class Machine, class Fill>
OPTIMIZER_INLINE void write_piece(Machine& machine, int& turn, int matrix, int row, int col, const Fill& fill) {
  const int buffer = turn++ % kBuffers;
  if (machine.issues()) {
    machine.wait_for_buffer();
  }
  machine.sync();
  fill(buffer);
  machine.publish();
  machine.sync();
  if (machine.issues()) {
    machine.store(buffer, matrix, row, col);
  }
}

// A warp holds 16 rows, two matrices of 8 x 8 one below the other for each 8 columns.
template <bool transposed, class Machine>
OPTIMIZER_INLINE void put_piece(Machine& machine, int buffer, const Pairs& pairs) {
  const int rows = machine.thread() / 32 * 2;  // the warp's first, in eights
#pragma unroll
  for (int eight = 0; eight < kPiece / 8; eight += 2) {
    const auto place = [&](int matrix, int i) {
      const int along_rows = rows + matrix % 2, along_cols = eight + matrix / 2;
      return transposed ? place_of(along_cols * 8 + i, along_rows) : place_of(along_rows * 8 + i, along_cols);
    };
    const uint32_t values[] = {pairs.at[eight][0], pairs.at[eight][1], pairs.at[eight + 1][0], pairs.at[eight + 1][1]};
    machine.template put_matrices<transposed>(buffer, place, values);
  }
}

// Operands that only commute give two roundings of one value: both places take the lower one.
template <class Machine>
OPTIMIZER_INLINE void put_diagonal_piece(Machine& machine, int buffer, const Pairs& pairs) {
#pragma unroll
  for (int i = 0; i < kPieceSums; ++i) {
    const int row = row_of_sum(machine.thread(), i), col = col_of_sum(machine.thread(), i);
    if (row >= col) {
      const uint16_t value = static_cast<uint16_t>(pairs.at[i / 4][i / 2 % 2] >> i % 2 * 16);
      machine.put(buffer, place_of_element(row, col), value);
      machine.put(buffer, place_of_element(col, row), value);
    }
  }
}

// Writes a part and its mirror image from `sums_of(piece)`; `turn` counts the warp group's pieces through the whole
// kernel. A piece's elements of D are loaded before the previous piece is written: the barriers of that write keep the
// compiler from moving loads across them, and each piece would wait for memory.
template <class Machine, class SumsOf>
OPTIMIZER_INLINE void write_part(Machine& machine, int& turn, const Result& result, const Part& part,
                                 const SumsOf& sums_of) {
  const auto is_written = [&](int piece) {
    return piece < kPieces && part.col + piece * kPiece <= part.row && part.row < result.m;
  };
  Pairs addend{};
  if (is_written(0)) {
    addend = load_addend(machine, result, part, part.col);
  }
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const int col = part.col + piece * kPiece;
    if (!is_written(piece)) {
      continue;
    }
    const Pairs next = is_written(piece + 1) ? load_addend(machine, result, part, col + kPiece) : Pairs{};
    const Pairs pairs = finish(machine, result, part, col, sums_of(piece), addend);
    addend = next;
    if (col == part.row) {
      write_piece(machine, turn, part.matrix, part.row, col,
                  [&](int buffer) { put_diagonal_piece(machine, buffer, pairs); });
      continue;
    }
    write_piece(machine, turn, part.matrix, part.row, col,
                [&](int buffer) { put_piece<false>(machine, buffer, pairs); });
    write_piece(machine, turn, part.matrix, col, part.row,
                [&](int buffer) { put_piece<true>(machine, buffer, pairs); });
  }
}

}  // namespace optimizer::hopper
