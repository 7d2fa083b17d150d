// What the warps of a block do, from section to section: one loads operands, two warp groups multiply and write.
//
// Both walk the same sections in the same order, each by itself: nothing is handed over but the operands' tiles. Of a
// `Machine`, besides what result.h and sections.h ask of it:
//
//     cluster(), clusters(), block()        which cluster of how many; which of its two blocks
//     group(), thread()                     which warp group that multiplies, which thread of it
//     tiles_along_k()                       how many tiles a whole square sums
//     load(square, tiles)                   starts to load these tiles of both operands for a square, in the order of k
//     finish_loads()                        waits until nobody in the cluster reads them any more
//     multiply(count)                       takes the next `count` tiles; returns the sums of this thread
//     finish_stores()                       waits until no store of this thread reads shared memory
#pragma once

#include "result.h"
#include "sections.h"

namespace optimizer::hopper {

template <class Machine>
OPTIMIZER_INLINE void load_sections(Machine& machine, const Sections& all) {
  for (int i = machine.cluster(); i < all.count; i += machine.clusters()) {
    const Section section = all.at(i);
    machine.load(section.square, tiles_of(section, machine.tiles_along_k()));
  }
  machine.finish_loads();
}

template <class Machine>
OPTIMIZER_INLINE void multiply_sections(Machine& machine, const Sections& all, const Result& result) {
  int turn = 0;
  for (int i = machine.cluster(); i < all.count; i += machine.clusters()) {
    const Section section = all.at(i);
    const auto sums = machine.multiply(tiles_of(section, machine.tiles_along_k()).count);
    if (section.sections == 1 || complete(machine, section, sums)) {
      write_part(machine, turn, result, part_of(section.square, machine.block(), machine.group()),
                 [&](int piece) { return sums_of_piece(machine, section, sums, piece); });
    }
  }
  if (machine.issues()) {
    machine.finish_stores();
  }
}

}  // namespace optimizer::hopper
