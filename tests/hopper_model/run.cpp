// A call, by clusters of threads in the roles that roles.h gives them.
#include "model.h"

#include <algorithm>
#include <cmath>

namespace hopper_model {

void run(const optimizer::HopperGemm& gemm, const Way& way) {
  Call call{gemm, sections_of_call(gemm.count, gemm.m, gemm.k, gemm.sections), result_of(gemm), way.omitted};
  const int64_t cut = gemm.count * call.sections.last;
  call.kept.assign(kept_sums(cut, call.sections.sections), std::nanf(""));
  call.arrivals.assign(cut * kParts, 0);
  for (int first = 0; first < way.clusters; first += way.together) {
    World world{call, way.clusters, Fibers(way.seed + first)};
    std::vector<std::unique_ptr<Machine>> machines;
    const auto add = [&](Cluster& cluster, int block, int group, int thread, State state, const auto& role) {
      machines.push_back(std::make_unique<Machine>(world, cluster, block, group, thread, state));
      ++cluster.blocks[block].alive;
      world.fibers.add([&block = cluster.blocks[block], &machine = *machines.back(), role] {
        role(machine);
        block.leave();
      });
    };
    const auto load = [&](Machine& machine) { load_sections(machine, call.sections); };
    const auto multiply = [&](Machine& machine) { multiply_sections(machine, call.sections, call.result); };
    for (int i = first; i < std::min(first + way.together, way.clusters); ++i) {
      Cluster& cluster = world.together.emplace_back();
      cluster.number = i;
      for (int block = 0; block < kBlocks; ++block) {
        add(cluster, block, 0, 0, {0, 1}, load);  // a stage that was never filled is empty
        for (int thread = 0; thread < kGroups * kGroupThreads; ++thread) {
          add(cluster, block, thread / kGroupThreads, thread % kGroupThreads, {}, multiply);
        }
      }
    }
    world.fibers.run();
  }
}

}  // namespace hopper_model
