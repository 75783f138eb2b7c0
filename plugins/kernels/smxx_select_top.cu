#include "kernels/block_rank.cuh"
#include "kernels/numeric.cuh"
#include "kernels/packed_tokens.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/smxx_select_top.h"

namespace m3::kernels {
namespace {

constexpr int64_t kScoreBudget = int64_t{256} << 20;
constexpr int WARPS = 8;
constexpr int FOURS = 10;        // of scores that a lane holds
constexpr int NARROW_FOURS = 2;  // where rows have no more
constexpr int CANDIDATES = 128;

struct RowShared {
  uint64_t candidates[CANDIDATES];
  int32_t chosen[kMaxTopK];
};

// Scores of the blocks base + 128 i + 4 lane + 0 .. 3; NaN, which is no candidate, from `end` on.
template <int kFours>
__device__ void load_scores(float (&x)[kFours][4], float const* scores, int32_t base, int32_t end,
                            int lane) {
  int32_t const block = base + 4 * lane;
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    float4 four{NAN, NAN, NAN, NAN};
    if (block + 128 * i < end) four = *reinterpret_cast<float4 const*>(scores + block + 128 * i);
    x[i][0] = four.x, x[i][1] = four.y, x[i][2] = four.z, x[i][3] = four.w;
  }
}

// A number that at least `count` lanes reach, if so many are above -inf, and not many more.
__device__ float common_floor(float x, int count) {
  auto const reaching = [&](float y) { return __popc(__ballot_sync(~0u, x >= y)); };
  float low = warp_min(x > -INFINITY ? x : INFINITY), high = warp_max(x);
  if (reaching(low) < count) return -INFINITY;
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {
    float const middle = 0.5f * low + 0.5f * high;
    int const lanes = reaching(middle);  // none if it is NaN
    if (lanes == count) return middle;
    (lanes > count ? low : high) = middle;
  }
  return low;
}

// Adds the scores that reach the floor to the candidates, if there is room; counts them anyway.
template <int kFours>
__device__ int add_candidates(RowShared& shared, int num, float const (&x)[kFours][4], float floor,
                              int32_t base, float const* scores, int lane) {
  constexpr int HALF = 2 * kFours;
  uint32_t mine[2] = {};
#pragma unroll
  for (int i = 0; i < 2 * HALF; ++i) {
    if (x[i / 4][i % 4] >= floor) mine[i / HALF] |= 1u << i % HALF;
  }
  int behind = __popc(mine[0]) + __popc(mine[1]);  // of this lane and those before it
  int at = num - behind;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    int const other = __shfl_up_sync(~0u, behind, distance);
    if (lane >= distance) behind += other;
  }
  at += behind;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    for (uint32_t left = mine[half]; left != 0 && at < CANDIDATES; left &= left - 1, ++at) {
      int const i = half * HALF + __ffs(static_cast<int>(left)) - 1;
      int32_t const block = base + i / 4 * 128 + 4 * lane + i % 4;
      shared.candidates[at] = rank_key(ordered_score(scores[block]), block);
    }
  }
  return num + __shfl_sync(~0u, behind, 31);
}

// The best block below the last one taken, `count` times over.
__device__ void choose_one_by_one(RowShared& shared, float const* scores, int32_t first,
                                  int32_t end, int count, int lane) {
  uint64_t last = ~uint64_t{0};
  for (int i = 0; i < count; ++i) {
    uint64_t best = 0;
    for (int32_t block = first + lane; block < end; block += 32) {
      uint64_t const key = rank_key(ordered_score(scores[block]), block);
      if (key < last && key > best) best = key;
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      uint64_t const other = __shfl_xor_sync(~0u, best, offset);
      if (other > best) best = other;
    }
    last = best;
    if (lane == 0) shared.chosen[i] = block_of(best);
  }
}

// The `count` best of the blocks [first, end), which are more, to shared.chosen in any order. With
// each lane's largest score there is a floor under the best ones, which few others reach.
template <int kFours>
__device__ void choose(RowShared& shared, float* scores, int32_t first, int32_t end, int count,
                       int lane) {
  // What is loaded along with them.
  if (lane < first) scores[lane] = NAN;
  if (lane < (-end & 3)) scores[end + lane] = NAN;
  __syncwarp();
  constexpr int CHUNK = 128 * kFours;
  float x[kFours][4];
  float largest = -INFINITY;
  int32_t base = (end - 1) / CHUNK * CHUNK;
#pragma unroll 1
  while (true) {
    load_scores(x, scores, base, end, lane);
#pragma unroll
    for (int i = 0; i < 4 * kFours; ++i) largest = fmaxf(largest, x[i / 4][i % 4]);
    if (base == 0) break;
    base -= CHUNK;
  }
  float const floor = common_floor(largest, count);
  int num = 0;
#pragma unroll 1
  while (true) {
    num = add_candidates(shared, num, x, floor, base, scores, lane);
    base += CHUNK;
    if (base >= end) break;
    load_scores(x, scores, base, end, lane);
  }
  if (num > CANDIDATES) return choose_one_by_one(shared, scores, first, end, count, lane);
  constexpr int STEP = 8;
  if (lane < STEP && num + lane < CANDIDATES) shared.candidates[num + lane] = 0;
  __syncwarp();
  for (int i = lane; i < num; i += 32) {
    uint64_t const key = shared.candidates[i];
    int rank = 0;
    for (int j = 0; j < num; j += STEP) {
#pragma unroll
      for (int k = 0; k < STEP; ++k) rank += shared.candidates[j + k] > key;
    }
    if (rank < count) shared.chosen[rank] = block_of(key);
  }
}

// A warp for each row.
template <int kFours>
__global__ void __launch_bounds__(32 * WARPS, kFours == NARROW_FOURS ? 6 : 3)
    select_top_kernel(BlockSelectParams const p, SelectRound const round) {
  __shared__ RowShared rows[WARPS];
  wait_for_previous_kernel();
  let_next_kernel_start();
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int const log_heads = 31 - __clz(p.num_index_heads);
  int32_t const row = blockIdx.x * WARPS + warp;
  int32_t const token = round.first + (row >> log_heads);
  if (token >= round.end) return;
  int64_t const head = row & (p.num_index_heads - 1);
  int32_t* const out = p.block_ids + (head * p.tokens.num_tokens + token) * p.top_k;
  TokenPlace const place = locate_token(p.tokens, token);
  int32_t const own = place.is_padding() ? -1 : place.own_block();
  int32_t const visible = min(own + 1, p.tokens.max_pages);
  if (visible <= p.top_k) {  // all of them, padding rows none
    if (lane < p.top_k) out[lane] = lane < visible ? lane : -1;
    return;
  }
  int32_t const first = p.init_blocks, end = min(own + 1 - p.local_blocks, visible);
  int const count = p.top_k - first - (visible - end);  // to choose from [first, end)
  if (lane < first) out[lane] = lane;
  if (lane < visible - end) out[first + count + lane] = end + lane;
  if (count == 0) return;
  RowShared& shared = rows[warp];
  choose<kFours>(shared, round.scores + int64_t{row} * round.pitch, first, end, count, lane);
  __syncwarp();
  if (lane >= count) return;
  int32_t const block = shared.chosen[lane];
  int rank = 0;
  for (int i = 0; i < count; ++i) rank += shared.chosen[i] < block;
  out[first + rank] = block;
}

}  // namespace

bool has_prefill_select(Type type, int32_t num_index_heads) {
  return type == Type::kBfloat16 && num_index_heads >= 1 && num_index_heads <= kMaxIndexHeads &&
         (num_index_heads & (num_index_heads - 1)) == 0;
}

int64_t prefill_select_workspace_bytes(int64_t num_tokens, int64_t num_index_heads,
                                       int64_t max_pages) {
  int64_t const pitch = ceil_div(std::max<int64_t>(max_pages, 1), kPagesPerStore) * kPagesPerStore;
  int64_t const row_bytes = pitch * int64_t{sizeof(float)};
  return std::min(num_tokens * num_index_heads * row_bytes,
                  std::max(kScoreBudget, kSelectRows * row_bytes));
}

cudaError_t launch_select_top(BlockSelectParams const& p, SelectRound const& round,
                              cudaStream_t stream) {
  int64_t const rows = int64_t{round.end - round.first} * p.num_index_heads;
  dim3 const grid(static_cast<unsigned>(ceil_div(rows, WARPS)));
  bool const is_narrow = p.tokens.max_pages <= 128 * NARROW_FOURS;
  return launch_behind(is_narrow ? select_top_kernel<NARROW_FOURS> : select_top_kernel<FOURS>, grid,
                       dim3(32 * WARPS), 0, stream, p, round);
}

}  // namespace m3::kernels
