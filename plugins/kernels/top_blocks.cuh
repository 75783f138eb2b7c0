#pragma once

#include "kernels/block_rank.cuh"
#include "kernels/global_memory.cuh"
#include "kernels/mma_sync.cuh"
#include "kernels/smxx_block_select.h"

// The best blocks of one row, found by one block of threads. The last of the bests of 32 groups
// that would be chosen is a lower bound for all; the few blocks that reach it are ranked by
// counting. All of it waits for itself: instructions count, not bytes.
namespace m3::kernels::top_blocks {

constexpr int GROUPS = 32;  // of threads: a selection is smaller
constexpr int MAX_CANDIDATES = 512;
constexpr int FEW = 64;  // are ranked without a bound
static_assert(kMaxTopK <= GROUPS, "a group's best is a candidate");

template <int kThreads>
struct alignas(16) Shared {
  static constexpr int CHUNK = kThreads <= 256 ? kThreads * 32 : 8192;

  uint32_t scores[CHUNK];  // of the row
  uint64_t candidates[MAX_CANDIDATES];
  uint32_t best[GROUPS];
  int32_t chosen[kMaxTopK];
  uint64_t bound;
  uint32_t bound_score;
  int32_t num_candidates;
};

// The blocks [low, high) compete for `count` places; the others are taken or not seen.
struct Contest {
  uint32_t const* scores;  // from a multiple of 16 bytes; 0 where one is still to be written
  int32_t low, high;
  int32_t count;

  __device__ bool competes(int32_t block) const { return block >= low && block < high; }
};

__device__ inline uint32_t wait_for_score(uint32_t const* score) {
  uint32_t x;
  do x = load_relaxed(score);
  while (x == 0);
  return x;
}

// The threads of a group are neighbours.
template <int kThreads>
struct Lane {
  static constexpr int GROUP = kThreads / GROUPS;  // threads

  int group, part;

  __device__ Lane()
      : group(static_cast<int>(threadIdx.x) / GROUP), part(static_cast<int>(threadIdx.x) % GROUP) {}
  template <class T, class F>
  __device__ static T reduce(T x, F const& join) {
#pragma unroll
    for (int offset = GROUP / 2; offset > 0; offset /= 2) {
      x = join(x, __shfl_xor_sync(~0u, x, offset));
    }
    return x;
  }
};

// A part of the row in shared memory, of which every thread has 32 scores: neighbouring fours in a
// long row, in a short one single scores so that no group remains without.
template <int kThreads>
struct Chunk {
  static constexpr int SIZE = Shared<kThreads>::CHUNK;
  static constexpr int FOURS = SIZE / (4 * kThreads);  // of a thread

  Shared<kThreads>& shared;
  Contest const& row;
  int32_t base, size;
  bool is_long;

  __device__ Chunk(Shared<kThreads>& shared, Contest const& row, int32_t base)
      : shared(shared),
        row(row),
        base(base),
        size(min(SIZE, row.high - base)),
        is_long(row.high - row.low > 4 * (kThreads - Lane<kThreads>::GROUP)) {}

  __device__ void copy(int32_t i) const {
    copy_async(shared_address(shared.scores + i), row.scores + base + i, true);
  }

  // Brings the scores, when all of them are written, and zeros for blocks that do not compete. The
  // thread's best.
  __device__ uint32_t load() const {
#pragma unroll 1
    for (int32_t i = threadIdx.x * 4; i < size; i += kThreads * 4) copy(i);
    uint32_t best;
    bool complete;
    do {
      commit_copies();
      wait_copies<0>();
      complete = true;
      best = 0;
#pragma unroll 1
      for (int32_t i = threadIdx.x * 4; i < size; i += kThreads * 4) {
        if (base + i < row.low || i + 4 > size) drop_others(i);
        uint4 const x = *reinterpret_cast<uint4 const*>(shared.scores + i);
        best = max(max(max(best, x.x), max(x.y, x.z)), x.w);
        if (min(min(x.x, x.y), min(x.z, x.w)) == 0 && is_absent(i)) {
          copy(i);
          complete = false;
        }
      }
    } while (!complete);
    __syncthreads();
    if (is_long) return best;
    best = 0;
#pragma unroll 1
    for (int k = 0; at(k) < size; ++k) best = max(best, shared.scores[at(k)]);
    return best;
  }

  // Where the thread's k-th four of neighbours stands, and those that exist, a bit each.
  __device__ static int32_t four(int k) {
    return (k * kThreads + static_cast<int32_t>(threadIdx.x)) * 4;
  }
  __device__ unsigned fours() const {
    unsigned exist = 0;
#pragma unroll
    for (int k = 0; k < FOURS; ++k) exist |= (four(k) < size ? 1u : 0u) << k;
    return exist;
  }

  __device__ uint4 scores_of(int k) const {
    return *reinterpret_cast<uint4 const*>(shared.scores + four(k));
  }

  // Brings the fours that are left, and drops from them those whose scores are all written.
  __device__ void take(unsigned& left) const {
    for (unsigned k = left; k != 0; k &= k - 1) copy(four(__ffs(static_cast<int>(k)) - 1));
    commit_copies();
    wait_copies<0>();
    for (unsigned k = left; k != 0; k &= k - 1) {
      int32_t const i = four(__ffs(static_cast<int>(k)) - 1);
      if (base + i < row.low || i + 4 > size) drop_others(i);
      uint4 const x = *reinterpret_cast<uint4 const*>(shared.scores + i);
      if (min(min(x.x, x.y), min(x.z, x.w)) > 0 || !is_absent(i)) left &= ~(k & -k);
    }
  }

  // Until most of what the warp will take is written, as far as some scores tell. To ask for all of
  // them all the time would keep the processor from scoring.
  __device__ void wait_for_samples() const {
    constexpr int STEP = 64;
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int32_t const i = lane / 2 * (kThreads * 4) + warp * 128 + lane % 2 * STEP + STEP / 2;
    bool const sampled = i < size && row.competes(base + i);
    int const samples = __popc(__ballot_sync(~0u, sampled));
    for (;;) {
      bool const written = sampled && load_relaxed(row.scores + base + i) != 0;
      if (2 * __popc(__ballot_sync(~0u, written)) >= samples) return;
      __nanosleep(100);
    }
  }

  __device__ void drop_others(int32_t i) const {
    for (int32_t j = i; j < i + 4; ++j) {
      if (!row.competes(base + j)) shared.scores[j] = 0;
    }
  }
  // Whether one of these four is still to be written.
  __device__ bool is_absent(int32_t i) const {
    bool absent = false;
    for (int32_t j = i; j < i + 4; ++j) absent |= row.competes(base + j) && shared.scores[j] == 0;
    return absent;
  }

  // Where the thread's k-th score stands.
  __device__ int32_t at(int k) const {
    Lane<kThreads> const lane;
    if (!is_long) return k * kThreads + lane.part * GROUPS + lane.group;
    return (k / 4 * kThreads + static_cast<int32_t>(threadIdx.x)) * 4 + k % 4;
  }

  // Calls visit(k) for the thread's scores that are at least `least`.
  template <class F>
  __device__ void for_each(uint32_t least, F const& visit) const {
    if (is_long) {
#pragma unroll 1
      for (int k = 0; at(k) < size; k += 4) {
        uint4 const x = *reinterpret_cast<uint4 const*>(shared.scores + at(k));
        if (max(max(x.x, x.y), max(x.z, x.w)) < least) continue;
        if (x.x >= least) visit(k);
        if (x.y >= least) visit(k + 1);
        if (x.z >= least) visit(k + 2);
        if (x.w >= least) visit(k + 3);
      }
    } else {
#pragma unroll 1
      for (int k = 0; at(k) < size; ++k) {
        if (shared.scores[at(k)] >= least) visit(k);
      }
    }
  }
  __device__ uint64_t key(int k) const { return rank_key(shared.scores[at(k)], base + at(k)); }
};

// The same out of line: it is called in two places.
template <int kThreads>
__device__ __noinline__ uint32_t load_chunk(Shared<kThreads>& shared, uint32_t const* scores,
                                            int32_t low, int32_t high, int32_t base) {
  Contest const row{scores, low, high, 0};
  return Chunk<kThreads>(shared, row, base).load();
}

// How many of keys[0 .. count) are larger, for all lanes of a group.
template <int kThreads, class T>
__device__ int32_t count_larger(T const* keys, int32_t count, T key) {
  int32_t larger = 0;
#pragma unroll 4
  for (int32_t i = Lane<kThreads>().part; i < count; i += Lane<kThreads>::GROUP) {
    larger += keys[i] > key;
  }
  return Lane<kThreads>::reduce(larger, [](int32_t a, int32_t b) { return a + b; });
}

// A score that at least row.count blocks reach, from the best that each thread has seen.
template <int kThreads>
__device__ uint32_t bound_of(uint32_t best, Contest const& row, Shared<kThreads>& shared) {
  Lane<kThreads> const lane;
  best = lane.reduce(best, [](uint32_t a, uint32_t b) { return max(a, b); });
  if (lane.part == 0) shared.best[lane.group] = best;
  __syncthreads();  // best, and what choose initialised
  int32_t larger = 0;
#pragma unroll
  for (int i = lane.part * 4; i < GROUPS; i += lane.GROUP * 4) {
    uint4 const four = *reinterpret_cast<uint4 const*>(shared.best + i);
    larger += (four.x > best) + (four.y > best) + (four.z > best) + (four.w > best);
  }
  larger = lane.reduce(larger, [](int32_t a, int32_t b) { return a + b; });
  uint32_t const least = __reduce_min_sync(~0u, larger < row.count ? best : ~0u);
  if (threadIdx.x % 32 == 0) atomicMin(&shared.bound_score, least);
  __syncthreads();
  return shared.bound_score;
}

template <int kThreads>
__device__ uint32_t find_bound(Contest const& row, Shared<kThreads>& shared) {
  uint32_t best = 0;
  for (int32_t base = 0; base < row.high; base += Chunk<kThreads>::SIZE) {
    if (base > 0) __syncthreads();  // the chunk before is read
    best = max(best, load_chunk(shared, row.scores, row.low, row.high, base));
  }
  return bound_of(best, row, shared);
}

// Adds keys of a chunk to the candidates, as far as there is room.
template <int kThreads>
__device__ void add_keys(Chunk<kThreads> const& chunk, uint32_t reaching) {
  if (reaching == 0) return;
  int32_t to = atomicAdd(&chunk.shared.num_candidates, __popc(reaching));
  for (; reaching != 0 && to < MAX_CANDIDATES; reaching &= reaching - 1, ++to) {
    chunk.shared.candidates[to] = chunk.key(__ffs(static_cast<int>(reaching)) - 1);
  }
}

// Those that reach the bound.
template <int kThreads>
__device__ void add_candidates(Chunk<kThreads> const& chunk, uint64_t bound) {
  uint32_t reaching = 0;
  chunk.for_each(static_cast<uint32_t>(bound >> 32), [&](int k) {
    if (chunk.key(k) >= bound) reaching |= 1u << k;
  });
  add_keys(chunk, reaching);
}

// The candidates of a long row while it is written: a bound for all comes from those scores that
// are there first.
template <int kThreads>
__device__ void add_arriving(Chunk<kThreads> const& chunk, Contest const& row) {
  unsigned const all = chunk.fours();
  unsigned left = all;
  chunk.wait_for_samples();
  // As long as groups may be empty of which the bound needs one.
  int const most = __reduce_add_sync(~0u, __popc(all)) * (GROUPS - row.count);
  do chunk.take(left);
  while (__reduce_add_sync(~0u, __popc(left)) * 2 * GROUPS > most);
  uint32_t best = 0;
  unsigned taken = all & ~left;
  for (unsigned k = taken; k != 0; k &= k - 1) {
    uint4 const x = chunk.scores_of(__ffs(static_cast<int>(k)) - 1);
    best = max(max(max(best, x.x), max(x.y, x.z)), x.w);
  }
  uint32_t const bound = max(bound_of(best, row, chunk.shared), 1u);  // zeros do not compete
  for (;;) {
    uint32_t reaching = 0;
    for (; taken != 0; taken &= taken - 1) {
      int const k = __ffs(static_cast<int>(taken)) - 1;
      uint4 const x = chunk.scores_of(k);
      unsigned const four =
          (x.x >= bound) | (x.y >= bound) << 1 | (x.z >= bound) << 2 | (x.w >= bound) << 3;
      reaching |= four << 4 * k;
    }
    add_keys(chunk, reaching);
    if (left == 0) return;
    taken = left;
    chunk.take(left);
    taken &= ~left;
  }
}

// Chooses the best of the first `count` candidates.
template <int kThreads>
__device__ void rank_candidates(Contest const& row, int32_t count, Shared<kThreads>& shared) {
  Lane<kThreads> const lane;
#pragma unroll 1
  for (int32_t first = 0; first < count; first += GROUPS) {
    int32_t const at = first + lane.group;
    uint64_t const key = at < count ? shared.candidates[at] : 0;
    int32_t const larger = count_larger<kThreads>(shared.candidates, count, key);
    if (lane.part != 0 || at >= count) continue;
    if (larger < row.count) shared.chosen[larger] = block_of(key);
    if (larger == row.count - 1) shared.bound = key;
  }
  __syncthreads();  // chosen, bound
}

// Writes the best blocks to shared.chosen, in any order. Keys differ, so that the result does not
// depend on the order in which candidates arrive.
template <int kThreads>
__device__ void choose(Contest const& row, Shared<kThreads>& shared) {
  int const thread = threadIdx.x;
  if (thread < kMaxTopK) shared.chosen[thread] = INT32_MAX;
  if (thread == 0) shared.bound_score = ~0u, shared.num_candidates = 0;
  if (row.high - row.low <= FEW) {  // a group may be empty: all are candidates
    int32_t const block = row.low + thread;
    if (block < row.high) {
      shared.candidates[thread] = rank_key(wait_for_score(row.scores + block), block);
    }
    __syncthreads();  // candidates
    return rank_candidates(row, row.high - row.low, shared);
  }
  bool found_some = false;
  if constexpr (kThreads > 256) {  // of whose rows many are long
    Chunk<kThreads> const all(shared, row, 0);
    found_some = row.high > Chunk<kThreads>::SIZE / 2 && row.high <= Chunk<kThreads>::SIZE;
    if (found_some) add_arriving(all, row);
  }
  uint64_t bound = found_some ? 0 : uint64_t{find_bound(row, shared)} << 32;
  for (;; found_some = false) {
    for (int32_t base = 0; !found_some && base < row.high; base += Chunk<kThreads>::SIZE) {
      Chunk<kThreads> const chunk(shared, row, base);
      if (row.high > Chunk<kThreads>::SIZE) {
        __syncthreads();  // the chunk before is read
        load_chunk(shared, row.scores, row.low, row.high, base);
      }
      add_candidates(chunk, bound);
    }
    __syncthreads();  // candidates
    int32_t const found = shared.num_candidates;
    rank_candidates(row, min(found, MAX_CANDIDATES), shared);
    if (found <= MAX_CANDIDATES) return;
    // Too many: the last chosen of those that found room is a higher bound.
    bound = shared.bound;
    if (thread == 0) shared.num_candidates = 0;
    __syncthreads();
  }
}

// How many of the `count` chosen blocks are lower than the i-th.
template <int kThreads>
__device__ int32_t place(Shared<kThreads> const& shared, int count, int i) {
  int32_t const block = shared.chosen[i];
  int32_t lower = 0;
  for (int k = 0; k < count; k += 4) {
    int4 const four = *reinterpret_cast<int4 const*>(shared.chosen + k);
    lower += (four.x < block) + (four.y < block) + (four.z < block) + (four.w < block);
  }
  return lower;
}

}  // namespace m3::kernels::top_blocks
