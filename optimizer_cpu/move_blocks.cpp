// move_blocks_ on the CPU: blocks are copied tile by tile, by threads that take turns.
//
// The checked arguments are in move_blocks.h; matrices.h cuts matrices into tiles. Rows that are runs of memory on both
// sides are copied whole, others by way of a tile in the nearest cache: read and written in the order of memory.
#include "../optimizer_common/move_blocks.h"
#include "tiles.h"

namespace optimizer {
namespace {

struct Size {
  int64_t rows, cols;
};

// Elements are copied as integers of their size: no bit of a NaN changes.
template <class T>
void copy(const View& to, const View& from, const Size& size) {
  T* target = reinterpret_cast<T*>(to.data);
  const T* source = reinterpret_cast<const T*>(from.data);
  for (int64_t r = 0; r < size.rows; ++r, target += to.row_stride, source += from.row_stride) {
    if (to.col_stride == 1 && from.col_stride == 1) {
      std::memcpy(target, source, size.cols * sizeof(T));
    } else {
      for (int64_t c = 0; c < size.cols; ++c) {
        target[c * to.col_stride] = source[c * from.col_stride];
      }
    }
  }
}

template <class T>
View part(const View& view, const Box& box) {
  return {reinterpret_cast<char*>(start_of<T>(view, box)), view.row_stride, view.col_stride};
}

// Transposes a box into a tile, some lines at once, so that neither reads nor writes jump at every element.
template <class T>
void transpose(T* tile, const View& from, const Size& size) {
  constexpr int64_t kLines = 8;
  const T* source = reinterpret_cast<const T*>(from.data);
  int64_t first = 0;
  for (; first + kLines <= size.rows; first += kLines, source += kLines * from.row_stride) {
    for (int64_t c = 0; c < size.cols; ++c) {
      T column[kLines];
      for (int64_t r = 0; r < kLines; ++r) {
        column[r] = source[r * from.row_stride + c * from.col_stride];
      }
      std::memcpy(tile + c * size.rows + first, column, sizeof(column));
    }
  }
  const Box rest{first, 0, size.rows - first, size.cols};
  copy<T>({reinterpret_cast<char*>(tile + first), 1, size.rows}, part<T>(from, rest), {rest.rows, rest.cols});
}

// At most one of the two lies by columns: rows of a buffer are runs.
template <class T>
void move_tile(const Matrix<2>& m, const Box& box) {
  const View to = part<T>(m.views[kTarget], box), from = part<T>(m.views[kSource], box);
  const Size size{box.rows, box.cols}, across{box.cols, box.rows};
  // Also where all rows are one, whose stride of 0 is the smaller one; then a box may be of many tiles.
  if (rows_are_runs(m)) {
    copy<T>(to, from, size);
    return;
  }
  T tile[kTileArea];
  char* const between = reinterpret_cast<char*>(tile);
  if (from.row_stride < from.col_stride) {
    transpose(tile, transposed(from), across);
    copy<T>(to, {between, box.cols, 1}, size);
  } else if (to.row_stride < to.col_stride) {
    transpose(tile, from, size);
    copy<T>(transposed(to), {between, box.rows, 1}, across);
  } else {
    copy<T>(to, from, size);
  }
}

// Adds the tiles that follow, up to `most` in all, to a box where they are one run or rows of one; returns how many.
int64_t join(Box& box, const Matrix<2>& m, int64_t tile, int64_t most) {
  const int64_t count = std::min(most, m.first_tile + m.tiles - tile);
  if (rows_are_runs(m) && m.rows == 1) {
    box.cols = std::min(count * m.tile_cols, m.cols - box.col);
    return count;
  }
  if (rows_are_runs(m) && m.tile_cols == m.cols) {
    box.rows = std::min(count * m.tile_rows, m.rows - box.row);
    return count;
  }
  return 1;
}

template <class T>
void move_tiles(const MoveBlocks& call) {
  share_tiles(call.tiles, [&](const Range& some) {
    const auto starts_later = [](int64_t tile, const MovedBlock& b) { return tile < b.first_tile; };
    for (int64_t tile = some.begin; tile < some.end;) {
      const MovedBlock& b = *(std::upper_bound(call.blocks.begin(), call.blocks.end(), tile, starts_later) - 1);
      const Matrix<2> m = matrix_of_tile(call.tensors, b, tile);
      Box box = tile_box(m, tile);
      const int64_t joined = join(box, m, tile, some.end - tile);
      move_tile<T>(m, box);
      tile += joined;
    }
  });
}

}  // namespace

void move_blocks_cpu(const MoveBlocks& call) {
  switch (call.tensors.element_size) {
    case 2: return move_tiles<uint16_t>(call);
    case 4: return move_tiles<uint32_t>(call);
    default: return move_tiles<uint64_t>(call);
  }
}

}  // namespace optimizer
