// What the warps of a block do, from square to square: one loads operands, two warp groups multiply and write.
//
// Both walk the same squares in the same order, each by itself: nothing is handed over but the operands' tiles. Of a
// `Machine`, besides what result.h asks of it:
//
//     cluster(), clusters(), block()        which cluster of how many; which of its two blocks
//     group(), thread()                     which warp group that multiplies, which thread of it
//     load(square)                          starts to load all tiles of both operands for a square, in the order of k
//     finish_loads()                        waits until nobody in the cluster reads them any more
//     multiply()                            takes the tiles of the next square; returns the sums of this thread
//     finish_stores()                       waits until no store of this thread reads shared memory
#pragma once

#include "result.h"

namespace optimizer::hopper {

template <class Machine>
OPTIMIZER_INLINE void load_squares(Machine& machine, const Squares& squares) {
  for (int i = machine.cluster(); i < squares.count; i += machine.clusters()) {
    machine.load(squares.at(i));
  }
  machine.finish_loads();
}

template <class Machine>
OPTIMIZER_INLINE void multiply_squares(Machine& machine, const Squares& squares, const Result& result) {
  int turn = 0;
  for (int i = machine.cluster(); i < squares.count; i += machine.clusters()) {
    const auto sums = machine.multiply();
    write_part(machine, turn, result, part_of(squares.at(i), machine.block(), machine.group()), sums);
  }
  if (machine.issues()) {
    machine.finish_stores();
  }
}

}  // namespace optimizer::hopper
