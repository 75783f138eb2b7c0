#include "kernels/packed_tokens.cuh"
#include "kernels/packs.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/smxx_cache_update.h"

namespace m3::kernels {
namespace {

constexpr int MAX_THREADS = 256;  // of a block
constexpr int MIN_THREADS = 128;
constexpr int LANES = 8;               // of a head: a team
constexpr int CHUNK = 8;               // channels side by side, of which a lane has two
constexpr int HALF = LANES * CHUNK;    // from a lane's one to its other one
constexpr int MAX_TOKENS = 16;         // of a block
constexpr int64_t MANY_ROUNDS = 5;     // of a block's teams
constexpr int64_t FEW_TOKENS = 512;    // blocks that just fill a GPU
constexpr int64_t MANY_TOKENS = 8192;  // from here on, blocks of few heads are small
constexpr int64_t FEW_HEADS = 16;
static_assert(kHeadSize == 2 * HALF, "a team holds one head");
static_assert(MAX_TOKENS <= 32, "a warp locates the tokens of a block");

enum Kind : int { kQ, kK, kV, kIndexQ, kIndexK, kKinds };

// Heads of a token's row of qkv, in order.
struct Heads {
  int q_end, k_end, v_end, index_q_end, count;

  __host__ __device__ explicit Heads(CacheUpdateParams const& p)
      : q_end(p.num_heads),
        k_end(q_end + p.num_kv_heads),
        v_end(k_end + p.num_kv_heads),
        index_q_end(v_end + p.num_index_heads),
        count(index_q_end + (p.num_index_heads > 0 ? 1 : 0)) {}

  __device__ int kind(int head) const {
    return (head >= q_end) + (head >= k_end) + (head >= v_end) + (head >= index_q_end);
  }
};

// What the heads of a token share.
struct Token {
  char* to[kKinds];  // of the row's first head, were it of this kind; null: nowhere
  bool padding;
};

// Four floats each, as the lanes of a team read them.
using Fours = float[2][LANES][4];

// kChunks: those of a lane that may turn.
template <int kChunks>
struct Shared {
  alignas(16) Fours norms[kKinds][2];  // of values: ones
  alignas(16) Fours cosines[MAX_TOKENS][kChunks];
  alignas(16) Fours sines[MAX_TOKENS][kChunks];  // negative for the first of a pair
  Token tokens[MAX_TOKENS];
};

__device__ float& of_channel(Fours* chunks, int channel) {
  return chunks[channel / HALF][channel % CHUNK / 4][channel % HALF / CHUNK][channel % 4];
}

__device__ void load_norm(float const* weight, Fours* to) {
  static_assert(MIN_THREADS >= kHeadSize, "a thread brings one weight");
  if (weight == nullptr || threadIdx.x >= kHeadSize) return;
  of_channel(to, static_cast<int>(threadIdx.x)) = weight[threadIdx.x];
}

// All threads. Channels that do not turn get an angle of zero.
template <int kChunks>
__device__ void prepare_angles(CacheUpdateParams const& p, int first_token, int num_tokens,
                               Shared<kChunks>& shared) {
  constexpr int PAIRS = kChunks * HALF / 2;
  int const half = p.rotary_dim / 2;
  for (int i = threadIdx.x; i < num_tokens * PAIRS; i += blockDim.x) {
    int const token = i / PAIRS, pair = i % PAIRS;
    int low = 2 * pair, high = low + 1;
    float sine = 0.f, cosine = 1.f;
    if (pair < half) {
      low = pair, high = pair + half;
      // Angles reach a million radians: the accurate sincosf, never the fast one. Positions are
      // exact below 2^24.
      float const position = static_cast<float>(p.position_ids[first_token + token]);
      sincosf(position * p.inv_freq[pair], &sine, &cosine);
    }
    of_channel(shared.cosines[token], low) = of_channel(shared.cosines[token], high) = cosine;
    of_channel(shared.sines[token], low) = -sine;
    of_channel(shared.sines[token], high) = sine;
  }
}

template <class T>
__device__ Token place_token(CacheUpdateParams const& p, Heads const& heads, int64_t token) {
  TokenPlace const at = locate_token(p.tokens, static_cast<int32_t>(token));
  int32_t const page = at.is_padding() ? -1 : page_of(p.tokens, at.request, at.own_block());
  int32_t const slot = at.position % kBlockSize;
  auto const address = [](void* base, int64_t head, float const* scale) {
    int64_t const bytes = kHeadSize * (scale == nullptr ? sizeof(T) : sizeof(__nv_fp8_e4m3));
    return static_cast<char*>(base) + head * bytes;
  };
  Token to{{}, at.is_padding()};
  to.to[kQ] = address(p.q, token * p.num_heads, nullptr);
  to.to[kIndexQ] = address(p.index_q, token * p.num_index_heads - heads.v_end, nullptr);
  if (page < 0) return to;
  int64_t const key = int64_t{page} * 2 * kBlockSize + slot, value = key + kBlockSize;
  to.to[kK] = address(p.kv_cache, key * p.num_kv_heads - heads.q_end, p.kv_scale);
  to.to[kV] = address(p.kv_cache, value * p.num_kv_heads - heads.k_end, p.kv_scale);
  int64_t const index_key = int64_t{page} * kBlockSize + slot;
  to.to[kIndexK] = address(p.index_cache, index_key - heads.index_q_end, p.index_scale);
  return to;
}

// Eight channels as stored. They are read for the last time, and what is stored below is not read
// soon: both leave the L2 cache before other data.
template <class T>
struct Stored {
  static constexpr int PACKS = CHUNK / Pack<T>::SIZE;
  Pack<T> packs[PACKS];

  __device__ void load(T const* from) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) packs[i] = {__ldcs(reinterpret_cast<uint4 const*>(from) + i)};
  }
  __device__ void unpack(float (&x)[CHUNK]) const {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      float part[Pack<T>::SIZE];
      packs[i].unpack(part);
#pragma unroll
      for (int j = 0; j < Pack<T>::SIZE; ++j) x[i * Pack<T>::SIZE + j] = part[j];
    }
  }
};

template <class T>
__device__ void store(T* to, float const (&x)[CHUNK]) {
  constexpr int SIZE = Pack<T>::SIZE;
#pragma unroll
  for (int i = 0; i < CHUNK / SIZE; ++i) {
    float part[SIZE];
#pragma unroll
    for (int j = 0; j < SIZE; ++j) part[j] = x[i * SIZE + j];
    __stcs(reinterpret_cast<uint4*>(to) + i, Pack<T>::of(part).bits);
  }
}

__device__ void store(__nv_fp8_e4m3* to, float const (&x)[CHUNK]) {
  __nv_fp8x4_e4m3 const fours[] = {__nv_fp8x4_e4m3(make_float4(x[0], x[1], x[2], x[3])),
                                   __nv_fp8x4_e4m3(make_float4(x[4], x[5], x[6], x[7]))};
  __stcs(reinterpret_cast<uint2*>(to), make_uint2(fours[0].__x, fours[1].__x));
}

// Where the other channels of a lane's pairs are.
template <int kChunks>
struct Others {
  int chunk[kChunks], lane[kChunks];

  __device__ Others(int own_lane, int rotary_dim) {
    int const half = rotary_dim / 2 / CHUNK;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      int const own = own_lane + i * LANES;
      int const other = own < half ? own + half : own < 2 * half ? own - half : own;
      chunk[i] = other / LANES, lane[i] = other % LANES;
    }
  }
};

// A lane's part of a head: the channels from CHUNK * lane on and those HALF further on, so that a
// team moves whole lines. The other channels of its pairs come from other lanes.
struct Part {
  float x[2][CHUNK];

  template <class T>
  __device__ void store_to(T* to) const {
    store(to, x[0]);
    store(to + HALF, x[1]);
  }

  // Over the team; the whole warp calls it.
  __device__ float sum_of_squares() const {
    float a = 0.f, b = 0.f;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) a = fmaf(x[0][i], x[0][i], a), b = fmaf(x[1][i], x[1][i], b);
    float sum = a + b;
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    return sum;
  }

  __device__ void scale(Fours const* norm, int lane, float factor) {
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
      float weight[CHUNK];
      read(norm[chunk], lane, weight);
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) x[chunk][i] *= factor * weight[i];
    }
  }

  __device__ void divide(float by) {
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) x[0][i] /= by, x[1][i] /= by;
  }

  // The whole warp calls it.
  template <int kChunks>
  __device__ void exchange(Others<kChunks> const& with, float (&other)[kChunks][CHUNK]) const {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) {
        other[chunk][i] = __shfl_sync(~0u, x[0][i], with.lane[chunk], LANES);
        if constexpr (kChunks > 1) {
          float const far = __shfl_sync(~0u, x[1][i], with.lane[chunk], LANES);
          if (with.chunk[chunk] == 1) other[chunk][i] = far;
        }
      }
    }
  }

  template <int kChunks>
  __device__ void turn(Fours const* cosines, Fours const* sines, int lane,
                       float const (&other)[kChunks][CHUNK]) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      float cosine[CHUNK], sine[CHUNK];
      read(cosines[chunk], lane, cosine);
      read(sines[chunk], lane, sine);
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) {
        x[chunk][i] = x[chunk][i] * cosine[i] + other[chunk][i] * sine[i];
      }
    }
  }

 private:
  __device__ static void read(Fours const& fours, int lane, float (&to)[CHUNK]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float4 const four = *reinterpret_cast<float4 const*>(fours[i][lane]);
      to[4 * i] = four.x, to[4 * i + 1] = four.y, to[4 * i + 2] = four.z, to[4 * i + 3] = four.w;
    }
  }
};

// Rotation unless it is a value, and to where it belongs. `kScaled`: there are scales.
template <class T, bool kScaled, int kChunks>
__device__ void finish_head(CacheUpdateParams const& p, Shared<kChunks> const& shared, int token,
                            int kind, int head, int lane, Part& part,
                            float const (&other)[kChunks][CHUNK]) {
  Token const& place = shared.tokens[token];
  char* const to = place.to[kind];
  if (to == nullptr) return;
  auto const first = static_cast<unsigned>(head * kHeadSize + lane * CHUNK);
  T* const out = reinterpret_cast<T*>(to + first * unsigned{sizeof(T)});
  if (place.padding) return Part{}.store_to(out);
  if (kind != kV) part.turn(shared.cosines[token], shared.sines[token], lane, other);
  if constexpr (kScaled) {
    float const* const scale = kind == kK || kind == kV ? p.kv_scale
                               : kind == kIndexK        ? p.index_scale
                                                        : nullptr;
    if (scale != nullptr) {
      part.divide(*scale);
      return part.store_to(reinterpret_cast<__nv_fp8_e4m3*>(to + first));
    }
  }
  part.store_to(out);
}

struct Steps {
  int32_t block_tokens;
  int32_t tokens, heads;  // from a team's head to its next one
  bool fill;              // the blocks alone fill the GPU
};

// Grid: (groups of tokens, parts of their heads). Teams go through the heads of all tokens of their
// block; while one is turned the next is on its way.
template <class T, bool kScaled, int kChunks>
__global__ void __launch_bounds__(MAX_THREADS, sizeof(T) == 2 ? 4 : 2)
    cache_update_kernel(__grid_constant__ CacheUpdateParams const p,
                        __grid_constant__ Steps const steps) {
  __shared__ Shared<kChunks> shared;
  if (!steps.fill) let_next_kernel_start();
  load_norm(p.q_norm, shared.norms[kQ]);  // no kernel writes them
  load_norm(p.k_norm, shared.norms[kK]);
  load_norm(p.index_q_norm, shared.norms[kIndexQ]);
  load_norm(p.index_k_norm, shared.norms[kIndexK]);
  if (threadIdx.x < kHeadSize) of_channel(shared.norms[kV], threadIdx.x) = 1.f;

  Heads const heads(p);
  int const first_token = blockIdx.x * steps.block_tokens;
  int const num_tokens = min(steps.block_tokens, p.tokens.num_tokens - first_token);
  int const teams = blockDim.x / LANES;
  int const rows = num_tokens * heads.count, step = gridDim.y * teams;
  int const lane = threadIdx.x % LANES;
  int row = blockIdx.y * teams + threadIdx.x / LANES;
  T const* from = static_cast<T const*>(p.qkv) +
                  (int64_t{first_token} * heads.count + row) * kHeadSize + lane * CHUNK;
  Stored<T> stored[2];
  auto const load_head = [&] {
    if (row >= rows) return;
    stored[0].load(from);
    stored[1].load(from + HALF);
  };

  if (int const token = static_cast<int>(blockDim.x - 1 - threadIdx.x); token < num_tokens) {
    shared.tokens[token] = place_token<T>(p, heads, first_token + token);
  }
  prepare_angles(p, first_token, num_tokens, shared);
  wait_for_previous_kernel();  // so far only inputs of the step were used
  load_head();
  if (steps.fill) let_next_kernel_start();  // earlier its blocks would be in the way
  __syncthreads();

  Others<kChunks> const others(lane, p.rotary_dim);
  int token = static_cast<int>(static_cast<unsigned>(row) / static_cast<unsigned>(heads.count));
  int head = row - token * heads.count;
  // All teams of a warp go round equally often: they meet in the sums of the norm.
  for (int const ahead = threadIdx.x % 32 / LANES; row - ahead < rows;) {
    Part part;
    stored[0].unpack(part.x[0]);
    stored[1].unpack(part.x[1]);
    row += step, from += int64_t{step} * kHeadSize;
    load_head();
    int const kind = heads.kind(head);
    float const squares = part.sum_of_squares();
    float const factor = kind == kV ? 1.f : rsqrtf(squares / kHeadSize + p.epsilon);
    part.scale(shared.norms[kind], lane, factor);
    float other[kChunks][CHUNK];
    part.exchange(others, other);
    if (token < num_tokens) {
      finish_head<T, kScaled>(p, shared, token, kind, head, lane, part, other);
    }
    token += steps.tokens, head += steps.heads;
    if (head >= heads.count) head -= heads.count, ++token;
  }
}

template <class T, bool kScaled>
cudaError_t launch(CacheUpdateParams const& p, cudaStream_t stream) {
  int64_t const tokens = p.tokens.num_tokens;
  int64_t const heads = Heads(p).count;
  int64_t const threads = tokens >= MANY_TOKENS && heads <= FEW_HEADS ? MIN_THREADS : MAX_THREADS;
  int64_t const teams = threads / LANES;
  // Few tokens: their heads spread over the GPU. Many: several share what a block prepares.
  int64_t const parts = tokens < FEW_TOKENS ? ceil_div(heads, teams) : 1;
  int64_t each = 1;
  while (2 * each <= MAX_TOKENS && 2 * each * heads <= MANY_ROUNDS * teams &&
         2 * each * FEW_TOKENS <= tokens) {
    each *= 2;
  }
  dim3 const grid(static_cast<unsigned>(ceil_div(tokens, each)), static_cast<unsigned>(parts));
  int64_t const step = parts * teams;
  Steps const steps{static_cast<int32_t>(each), static_cast<int32_t>(step / heads),
                    static_cast<int32_t>(step % heads), tokens >= FEW_TOKENS};
  auto const kernel = p.rotary_dim <= HALF ? cache_update_kernel<T, kScaled, 1>
                                           : cache_update_kernel<T, kScaled, 2>;
  return launch_behind(kernel, grid, dim3(static_cast<unsigned>(threads)), 0, stream, p, steps);
}

}  // namespace

cudaError_t launch_cache_update(CacheUpdateParams const& p, cudaStream_t stream) {
  if (p.tokens.num_tokens == 0) return cudaSuccess;
  if (p.rotary_dim % 16 != 0 || p.rotary_dim > kHeadSize) return cudaErrorInvalidValue;
  return launch_typed(p.type, [&](auto t) {
    bool const scaled = p.kv_scale != nullptr || p.index_scale != nullptr;
    return scaled ? launch<decltype(t), true>(p, stream) : launch<decltype(t), false>(p, stream);
  });
}

}  // namespace m3::kernels
