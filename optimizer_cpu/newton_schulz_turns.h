// Who does what in newton_schulz_ and gram_newton_schulz_. A thread takes a matrix through all links: its core's cache
// keeps the matrix, and no thread waits for another between two links. Matrices that are left over are shared, link by
// link.
#pragma once

#include "newton_schulz_links.h"

namespace optimizer {

// The first matrices, a multiple of the number of threads, which take them one by one. Returns how many: none if there
// are fewer matrices or rooms than threads.
template <class Element, class LinksAt>
int64_t iterate_alone(const Iterated<Element>& call, const Instructions<Element>& by, const LinksAt& links_at) {
  double grains = 0;
  int64_t bytes = 0;
  for (const auto& link : links_at(MatrixSlice{0, call.count, 0, true})) {
    grains += link->grains();
    bytes = std::max(bytes, link->bytes());
  }
  const int64_t threads = std::clamp<int64_t>(call.count * grains, 1, most_threads());
  const int64_t matrices = call.count / threads * threads;
  if (matrices == 0 || call.rooms < threads) {
    return 0;
  }
  const CallMemory memory(threads * bytes, threads);
  take_turns(matrices, 1, threads, [&](int64_t thread, const auto& next) {
    const Links links = links_at(MatrixSlice{0, call.count, thread, true});
    TileState before;
    by.enter(before);
    for (Range some = next(); some.size() > 0; some = next()) {
      for (const auto& link : links) {
        link->finish(some.begin, memory.data() + thread * bytes);
      }
    }
    by.leave(before);
  });
  return matrices;
}

// links_at(slice) makes the links for some matrices.
template <class Element, class LinksAt>
void iterate(const Iterated<Element>& call, const Instructions<Element>& by, const LinksAt& links_at) {
  for (int64_t begin = call.alone ? iterate_alone(call, by, links_at) : 0; begin < call.count; begin += call.rooms) {
    for (const auto& link : links_at(MatrixSlice{begin, std::min(call.rooms, call.count - begin), 0, false})) {
      link->finish_all();
    }
  }
}

}  // namespace optimizer
