// The checked arguments of move_blocks_; its contract is in torch-ext/optimizer/kernels/portable/move_blocks.py.
#pragma once

#include "arguments.h"

#include <limits>

namespace optimizer {

enum MoveView { kTarget, kSource };

// A row of `blocks`.
struct Block {
  int64_t count, position, top, left, rows, cols, offset, step, row_step;
};
constexpr int64_t kBlockFields = sizeof(Block) / sizeof(int64_t);

// A block that is checked, in few bytes: a launch on a GPU carries hundreds.
struct MovedBlock {
  int64_t first;                   // of the elements of the matrices
  int64_t offset, step, row_step;  // in the buffer
  int32_t count, rows, cols;
  int32_t first_tile;  // in the call
};

// The tensors of a call; strides count elements.
struct MovedTensors {
  char *matrices, *buffer;
  int64_t strides[3];  // of the matrices
  int64_t element_size;
  bool to_buffer;
};

struct MoveBlocks {
  MovedTensors tensors;
  int32_t device;
  int64_t tiles;
  std::vector<MovedBlock> blocks;  // none is empty
};

void move_blocks_cpu(const MoveBlocks& call);
void move_blocks_cuda(const MoveBlocks& call);

// The tensors at one of a block's matrices, without its first tile.
OPTIMIZER_INLINE Matrix<2> matrix_at(const MovedTensors& t, const MovedBlock& b, int64_t i) {
  char* const in_matrices = t.matrices + (b.first + i * t.strides[0]) * t.element_size;
  char* const in_buffer = t.buffer + (b.offset + i * b.step) * t.element_size;
  const View matrix = make_view(in_matrices, b.rows, b.cols, t.strides[1], t.strides[2]);
  const View part = make_view(in_buffer, b.rows, b.cols, b.row_step, 1);
  Matrix<2> m{b.rows, b.cols, {t.to_buffer ? part : matrix, t.to_buffer ? matrix : part}, i};
  if (is_one_run(m)) {
    collapse(m);
  }
  cut(m, rows_are_runs(m));
  return m;
}

// The matrix of a block that holds the tile.
OPTIMIZER_INLINE Matrix<2> matrix_of_tile(const MovedTensors& t, const MovedBlock& b, int64_t tile) {
  const int64_t tiles = matrix_at(t, b, 0).tiles, i = quotient_of_tiles(tile - b.first_tile, tiles);
  Matrix<2> m = matrix_at(t, b, i);
  m.first_tile = b.first_tile + i * tiles;
  return m;
}

// Whether a block that is not empty and has no negative field ends in a buffer of this size; no sum can overflow.
inline bool ends_within(const Block& b, int64_t size) {
  if (b.offset >= size) {
    return false;
  }
  int64_t left = size - 1 - b.offset;  // behind the block's first element
  const std::pair<int64_t, int64_t> ways[] = {{1, b.cols - 1}, {b.row_step, b.rows - 1}, {b.step, b.count - 1}};
  for (const auto& [step, times] : ways) {
    if (times > 0 && step > left / times) {
      return false;
    }
    left -= times * step;
  }
  return true;
}

// Of numbers that are not negative.
inline bool is_within(int64_t first, int64_t length, int64_t size) {
  return length <= size - first;
}

inline bool is_empty(const Block& b) {
  return b.count == 0 || b.rows == 0 || b.cols == 0;
}

inline void check_block(const Block& b, int64_t i, const Tensor& matrices, const Tensor& buffer) {
  const int64_t* fields = &b.count;
  const auto text = [&] { return "blocks[" + std::to_string(i) + "] = " + tuple({fields, size_t{kBlockFields}}); };
  STD_TORCH_CHECK(std::all_of(fields, fields + kBlockFields, [](int64_t field) { return field >= 0; }), text(),
                  " must not be negative");
  STD_TORCH_CHECK(is_within(b.position, b.count, matrices.size(0)) && is_within(b.top, b.rows, matrices.size(1)) &&
                      is_within(b.left, b.cols, matrices.size(2)),
                  text(), " is not within matrices of shape ", shape(matrices));
  STD_TORCH_CHECK(is_empty(b) || ends_within(b, buffer.numel()), text(), " is not within a buffer of ", buffer.numel(),
                  " elements");
}

inline void check_moved(const Tensor& matrices, const Tensor& buffer, const Tensor& blocks, bool to_buffer) {
  check_like("buffer", buffer, buffer);
  check_like("matrices", matrices, buffer);
  STD_TORCH_CHECK(matrices.scalar_type() == buffer.scalar_type(), "matrices and buffer must have one dtype, got ",
                  matrices.scalar_type(), " and ", buffer.scalar_type());
  const auto sizes = matrices.sizes();
  constexpr int64_t kLargestInt = std::numeric_limits<int32_t>::max();
  STD_TORCH_CHECK(matrices.dim() == 3 && *std::max_element(sizes.begin(), sizes.end()) <= kLargestInt,
                  "matrices must be (B, rows, cols), each less than 2^31, got ", shape(matrices));
  STD_TORCH_CHECK(buffer.dim() == 1 && buffer.is_contiguous(), "buffer must be contiguous and 1-D, got shape ",
                  shape(buffer), " with strides ", tuple(buffer.strides()));
  STD_TORCH_CHECK(blocks.is_cpu() && blocks.scalar_type() == ScalarType::Long, "blocks must be Long on the CPU, got ",
                  blocks.scalar_type(), " on ", place(blocks));
  STD_TORCH_CHECK(blocks.dim() == 2 && blocks.size(1) == kBlockFields && blocks.is_contiguous(), "blocks must be (N, ",
                  kBlockFields, "), contiguous, got shape ", shape(blocks), " with strides ", tuple(blocks.strides()));
  Spans spans(3);
  spans.read("blocks", blocks);
  if (to_buffer) {
    spans.write("buffer", buffer);
    spans.read("matrices", matrices);
  } else {
    spans.write("matrices", matrices);
    spans.read("buffer", buffer);
  }
  spans.check();
}

inline MoveBlocks check_move_blocks(const Tensor& matrices, const Tensor& buffer, const Tensor& blocks,
                                    bool to_buffer) {
  check_moved(matrices, buffer, blocks, to_buffer);
  const auto strides = matrices.strides();
  MoveBlocks call{.tensors = {.matrices = data_of(matrices, !to_buffer),
                              .buffer = data_of(buffer, to_buffer),
                              .strides = {strides[0], strides[1], strides[2]},
                              .element_size = element_size(buffer.scalar_type()),
                              .to_buffer = to_buffer},
                  .device = buffer.get_device_index()};
  const Block* rows = static_cast<const Block*>(blocks.const_data_ptr());
  call.blocks.reserve(blocks.size(0));
  for (int64_t i = 0; i < blocks.size(0); ++i) {
    const Block& b = rows[i];
    check_block(b, i, matrices, buffer);
    if (is_empty(b)) {
      continue;
    }
    const int64_t first = b.position * strides[0] + b.top * strides[1] + b.left * strides[2];
    const MovedBlock moved{first,
                           b.offset,
                           b.step,
                           b.row_step,
                           static_cast<int32_t>(b.count),
                           static_cast<int32_t>(b.rows),
                           static_cast<int32_t>(b.cols),
                           static_cast<int32_t>(call.tiles)};
    const int64_t tiles = matrix_at(call.tensors, moved, 0).tiles;
    STD_TORCH_CHECK(b.count <= (std::numeric_limits<int32_t>::max() - call.tiles) / tiles, "blocks[", i,
                    "] and those before it are more than one call can have: 2^31 tiles of up to ", kTileArea,
                    " elements");
    call.tiles += b.count * tiles;
    call.blocks.push_back(moved);
  }
  return call;
}

}  // namespace optimizer
