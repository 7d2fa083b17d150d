// What the host's part of hopper_gemm_ asks of CUDA's runtime and driver, instead of a device.
//
// host.cu is the package's own source, compiled by nvcc, with what tells the parameters of a launch. runtime.cpp stands
// for the runtime, the driver and torch for CUDA. It refuses what they refuse, keeps what it is asked, starts nothing.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace hopper_host {

using Numbers = std::vector<int64_t>;

// Keeps one thing that was asked: its name and its numbers.
void tell(const std::string& what, const Numbers& numbers);

// A driver's description of a tensor, in the place of the 128 bytes that only a device reads.
struct Map {
  uint64_t address, sizes[5], strides[4];  // strides in bytes, without the first one
  uint32_t box[5];
  uint8_t rank, type, swizzle;
};
static_assert(sizeof(Map) <= 128);

// Rank, type, swizzle and address; then sizes, strides and box, each of `rank` numbers.
inline Numbers numbers_of(const void* descriptor, int64_t element_bytes) {
  Map map;
  std::memcpy(&map, descriptor, sizeof map);
  Numbers numbers{map.rank, map.type, map.swizzle, static_cast<int64_t>(map.address)};
  numbers.insert(numbers.end(), map.sizes, map.sizes + map.rank);
  numbers.push_back(element_bytes);
  numbers.insert(numbers.end(), map.strides, map.strides + map.rank - 1);
  numbers.insert(numbers.end(), map.box, map.box + map.rank);
  return numbers;
}

// Tells the parameters of a launch of `kernel`, which must be one of the package's.
void tell_parameters(const void* kernel, const void* parameters);

}  // namespace hopper_host
