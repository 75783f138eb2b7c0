#pragma once

#include "kernels/block_rank.cuh"
#include "kernels/smxx_block_select.h"

// The best blocks of one row, found by one block of threads. The last of the bests
// of 64 groups that would be chosen is a lower bound for all; the few blocks that reach it are
// ranked by counting.
namespace m3::kernels::top_blocks {

constexpr int GROUPS = 64;  // of threads: a selection is smaller
constexpr int HELD = 8;     // times four scores that a thread keeps in registers
constexpr int MAX_CANDIDATES = 512;
static_assert(kMaxTopK < GROUPS, "a group's best is a candidate");

template <int kThreads>
struct Shared {
  uint64_t best[kThreads];
  uint64_t candidates[MAX_CANDIDATES];
  uint64_t bound;
  int32_t num_candidates;
  int32_t chosen[kMaxTopK];
};

// The blocks [low, high) compete for `count` places; the others are taken or not seen.
struct Contest {
  uint32_t const* scores;
  int32_t low, high;
  int32_t count;
};

// A thread's scores of a chunk of the row, 0 for blocks that do not compete.
template <int kThreads>
struct Held {
  static constexpr int CHUNK = kThreads * HELD * 4;  // blocks

  uint32_t x[HELD][4];

  __device__ static int32_t block(int32_t chunk, int i) {
    return chunk * CHUNK + (i * kThreads + static_cast<int32_t>(threadIdx.x)) * 4;
  }
  // Past L1: scores may have been read here before they were written.
  __device__ void load(Contest const& row, int32_t chunk) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      int32_t const first = block(chunk, i);
      uint4 four{};
      if (first < row.high) four = __ldcg(reinterpret_cast<uint4 const*>(row.scores + first));
      x[i][0] = four.x, x[i][1] = four.y, x[i][2] = four.z, x[i][3] = four.w;
    }
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int32_t const at = block(chunk, i) + j;
        if (at < row.low || at >= row.high) x[i][j] = 0;
      }
    }
  }
  template <class F>
  __device__ void for_each(int32_t chunk, F const& visit) const {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) visit(x[i][j], block(chunk, i) + j);
    }
  }
};

// How many of keys[0 .. count) are larger; the key behind an odd number of them is 0.
__device__ inline int32_t count_larger(uint64_t const* keys, int32_t count, uint64_t key) {
  int32_t larger = 0;
#pragma unroll 4
  for (int32_t i = 0; i < count; i += 2) {
    ulonglong2 const pair = *reinterpret_cast<ulonglong2 const*>(keys + i);
    larger += (pair.x > key) + (pair.y > key);
  }
  return larger;
}

// A key that at least row.count blocks reach: the best of each group of threads compete first.
template <int kThreads>
__device__ void find_bound(Contest const& row, int32_t chunks, Held<kThreads>& held,
                           Shared<kThreads>& shared) {
  int const thread = threadIdx.x;
  uint32_t score = 0;
  int32_t block = 0;
  for (int32_t chunk = 0; chunk < chunks; ++chunk) {
    held.load(row, chunk);
    held.for_each(chunk, [&](uint32_t x, int32_t at) {
      if (x > score) score = x, block = at;
    });
  }
  uint64_t best = score == 0 ? 0 : rank_key(score, block);
  shared.best[thread] = best;
  __syncthreads();
  if (thread < GROUPS) {
#pragma unroll
    for (int i = 1; i < kThreads / GROUPS; ++i) {
      best = max(best, shared.best[thread + i * GROUPS]);
    }
    shared.candidates[thread] = best;
  }
  __syncthreads();
  if (thread < GROUPS && count_larger(shared.candidates, GROUPS, best) == row.count - 1) {
    shared.bound = best;
  }
}

// Chooses the best of the first `count` candidates.
template <int kThreads>
__device__ void rank_candidates(Contest const& row, int32_t count, Shared<kThreads>& shared) {
  int const thread = threadIdx.x;
  if (count % 2 == 1 && thread == 0) shared.candidates[count] = 0;
  __syncthreads();  // candidates
  for (int32_t i = thread; i < count; i += kThreads) {
    uint64_t const key = shared.candidates[i];
    int32_t const rank = count_larger(shared.candidates, count, key);
    if (rank < row.count) shared.chosen[rank] = block_of(key);
    if (rank == row.count - 1) shared.bound = key;
  }
  __syncthreads();  // chosen, bound
}

// Writes the best blocks to shared.chosen, in any order. Keys differ, so that the result does not
// depend on the order in which candidates arrive.
template <int kThreads>
__device__ void choose(Contest const& row, Shared<kThreads>& shared) {
  int const thread = threadIdx.x;
  if (thread < kMaxTopK) shared.chosen[thread] = INT32_MAX;
  if (row.high - row.low <= GROUPS * 4) {  // a group may be empty
    for (int32_t i = thread; i < row.high - row.low; i += kThreads) {
      shared.candidates[i] = rank_key(__ldcg(row.scores + row.low + i), row.low + i);
    }
    rank_candidates(row, row.high - row.low, shared);
    return;
  }
  int32_t const chunks = (row.high + Held<kThreads>::CHUNK - 1) / Held<kThreads>::CHUNK;
  Held<kThreads> held;
  find_bound(row, chunks, held, shared);
  for (;;) {
    if (thread == 0) shared.num_candidates = 0;
    __syncthreads();  // bound and count
    uint64_t const bound = shared.bound;
    auto const bound_score = static_cast<uint32_t>(bound >> 32);
    for (int32_t chunk = 0; chunk < chunks; ++chunk) {
      if (chunks > 1) held.load(row, chunk);
      held.for_each(chunk, [&](uint32_t x, int32_t block) {
        if (x < bound_score || rank_key(x, block) < bound) return;
        int32_t const at = atomicAdd(&shared.num_candidates, 1);
        if (at < MAX_CANDIDATES) shared.candidates[at] = rank_key(x, block);
      });
    }
    __syncthreads();  // count
    int32_t const found = shared.num_candidates;
    rank_candidates(row, min(found, MAX_CANDIDATES), shared);
    // Too many: the last chosen of those that found room is a higher bound.
    if (found <= MAX_CANDIDATES) return;
  }
}

// How many of the chosen blocks are lower than the i-th.
template <int kThreads>
__device__ int32_t place(Shared<kThreads> const& shared, int i) {
  int32_t lower = 0;
#pragma unroll
  for (int32_t const block : shared.chosen) lower += block < shared.chosen[i];
  return lower;
}

}  // namespace m3::kernels::top_blocks
