#pragma once

#include <cstdint>

// The order in which a selection prefers blocks: score first, then the lower block.
namespace m3::kernels {

// Above every score (+inf is 0xff800000, NaN does not occur), below the first `last` of a
// selection.
constexpr uint32_t kForcedRank = 0xfffffffeu;

// Ordered like the scores, of which none is NaN; 0 is below all.
__device__ inline uint32_t ordered_score(float score) {
  uint32_t const bits = __float_as_uint(score + 0.f);  // -0 becomes +0, so that they tie
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

// Larger is better, no two blocks are equal.
__device__ inline uint64_t rank_key(uint32_t ordered, int32_t block) {
  return uint64_t{ordered} << 32 | (0xffffffffu - static_cast<uint32_t>(block));
}
__device__ inline uint64_t rank_key(float score, int32_t block, bool forced) {
  return rank_key(forced ? kForcedRank : ordered_score(score), block);
}

__device__ inline int32_t block_of(uint64_t key) {
  return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(key));
}

}  // namespace m3::kernels
