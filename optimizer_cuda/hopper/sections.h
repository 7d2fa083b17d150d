// How warp groups that sum sections of one part of a square put their sums together.
//
// Each writes its sums to memory and counts itself as arrived. Whoever arrives last adds the sums up, in the order of k,
// and writes the result. Nobody waits for another cluster, so a launch ends however few of them run at one time. Which
// warp group is the last does not change a bit, as it reads its own sums back too.
//
// What only the device can do is asked of a `Machine`:
//
//     keep(place, sums)      writes four sums to the memory of the call, from number `place` on
//     kept(place)            returns what is there
//     sync()                 waits for all threads of the warp group
//     count(part)            by one thread: adds 1 to the arrivals at a part. Before, it makes visible to the GPU what its
//                            warp group kept; afterwards it sees what all those kept that arrived before
//     arrived()              returns how many had arrived before its warp group did
#pragma once

#include "result.h"

namespace optimizer::hopper {

constexpr int kGroups = kTileRows / kPartRows;  // warp groups of a block that multiply
constexpr int kParts = kSquare / kPartRows;     // of a square
constexpr int kTogether = 4;                    // sums of a thread in one access of 16 bytes

struct alignas(16) FourSums {
  float at[kTogether];
};

// Of the call's memory, for `squares` squares in `sections` sections.
inline int64_t kept_sums(int64_t squares, int64_t sections) { return squares * sections * kSquare * kSquare; }

// Where four sums of a thread stand: neighbouring threads beside each other.
OPTIMIZER_INLINE int64_t place_of_sums(int64_t part, const Section& at, int section, int thread, int i) {
  const int64_t in_section = (part * at.sections + section) * kSums / kTogether + i / kTogether;
  return (in_section * kGroupThreads + thread) * kTogether;
}

// The number of this warp group's part among those of all squares that are cut.
template <class Machine>
OPTIMIZER_INLINE int part_number(const Machine& machine, const Section& at) {
  return at.number * kParts + machine.block() * kGroups + machine.group();
}

// Keeps the sums of a section. Returns whether those of its part are complete now.
template <class Machine, class Sums>
OPTIMIZER_INLINE bool complete(Machine& machine, const Section& at, const Sums& sums) {
  const int part = part_number(machine, at);
#pragma unroll
  for (int i = 0; i < kSums; i += kTogether) {
    const FourSums four{sums[i], sums[i + 1], sums[i + 2], sums[i + 3]};
    machine.keep(place_of_sums(part, at, at.section, machine.thread(), i), four);
  }
  machine.sync();
  if (machine.issues()) {
    machine.count(part);
  }
  machine.sync();
  return machine.arrived() == at.sections - 1;
}

// The sums of a piece of a part: those of this thread, or of all sections if it has several. Pieces are read one by one,
// as reading whole parts takes more registers than there are.
template <class Machine, class Sums>
OPTIMIZER_INLINE PieceSums sums_of_piece(const Machine& machine, const Section& at, const Sums& sums, int piece) {
  const int part = part_number(machine, at), first = piece * kPieceSums;
  PieceSums result{};
  if (at.sections == 1) {
#pragma unroll
    for (int i = 0; i < kPieceSums; ++i) {
      result.at[i] = sums[first + i];
    }
    return result;
  }
  for (int section = 0; section < at.sections; ++section) {
#pragma unroll
    for (int i = 0; i < kPieceSums; i += kTogether) {
      const FourSums more = machine.kept(place_of_sums(part, at, section, machine.thread(), first + i));
#pragma unroll
      for (int e = 0; e < kTogether; ++e) {
        result.at[i + e] += more.at[e];
      }
    }
  }
  return result;
}

}  // namespace optimizer::hopper
