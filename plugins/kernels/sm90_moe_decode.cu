#include <cuda_bf16.h>

#include <algorithm>

#include "kernels/global_memory.cuh"
#include "kernels/numeric.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/sm90_moe_decode_plan.cuh"
#include "kernels/this_device.h"

// All of a decode step behind the router's logits in one kernel, so that the stream of weights
// never stops: one CTA a multiprocessor, whose ring of shared memory fills with the shared expert's
// weights before the routing is known and with proj's before their activations are.
//
// A "visit" is an expert that the step reads: the shared one, then the chosen ones. A CTA computes
// some "units" of fc, four gate rows and the four up rows that go with them, then of every visit
// the same few "tiles" of eight rows of proj: so it sums over experts alone, and writes its part of
// y. All tokens are one operand of the tensor cores' instructions. fc multiplies with all of them,
// whoever chose the expert, so that they stay in registers; only what was chosen is kept.
namespace m3::kernels {
namespace {

constexpr int WARPS = SM90_MOE_DECODE_WARPS;
constexpr int TOKENS = SM90_MOE_DECODE_TOKENS;
constexpr int THREADS = WARPS * 32 + 64;  // a warp loads weights, another activations
constexpr int BOUND_THREADS = 704;        // 80 registers: a block of the router fits beside it
constexpr int ROWS = 8;                   // weight rows of one instruction
constexpr int STEP = 32;                  // columns of two instructions
constexpr int FC_STEPS = 4;               // of one warp in a stage
constexpr int FC_COLUMNS = WARPS * FC_STEPS * STEP;
constexpr int FC_BLOCKS = SM90_MOE_DECODE_HIDDEN / FC_COLUMNS;
constexpr int FC_PITCH = FC_COLUMNS * 2 + 64;  // bytes; two rows of 64 bytes fill the banks
constexpr int PROJ_COLUMNS = 768;              // of a stage, at most
constexpr int STAGE_BYTES = 3 * ROWS * PROJ_COLUMNS * 2;
constexpr int STAGES = 5;
constexpr int ACTIVATION_BYTES = 2 * TOKENS * PROJ_COLUMNS * 2;  // of all stages
constexpr int MAX_ACTIVATION_STAGES = 4;
constexpr int BARRIER = 1;  // of the warps that multiply
static_assert(TOKENS <= 8, "all tokens are one operand");
static_assert(ROWS * FC_PITCH <= STAGE_BYTES, "a stage of fc fits");

struct DecodeArgs {
  MoeParams p;
  Sm90MoeWorkspace ws;
  int hidden, width, tokens;
  int units;            // of fc of one visit
  int blocks, columns;  // of proj's K; the last block may have fewer columns
  int stage_tiles;      // of proj in a stage, at most
  int activation_stages;

  DecodeArgs(MoeParams const& params, Sm90MoeWorkspace const& workspace)
      : p(params),
        ws(workspace),
        hidden(static_cast<int>(p.hidden)),
        width(static_cast<int>(p.width)),
        tokens(static_cast<int>(p.tokens)),
        units(width / 4) {
    blocks = (width + PROJ_COLUMNS - 1) / PROJ_COLUMNS;
    columns = ((width + blocks - 1) / blocks + 63) / 64 * 64;
    stage_tiles = std::min(WARPS, STAGE_BYTES / (ROWS * columns * 2));
    activation_stages = std::min(MAX_ACTIVATION_STAGES, ACTIVATION_BYTES / (TOKENS * columns * 2));
  }
};

struct Shared {
  uint64_t full[STAGES];
  uint64_t empty[STAGES];
  uint64_t activations_full[MAX_ACTIVATION_STAGES];
  uint64_t activations_empty[MAX_ACTIVATION_STAGES];
  uint64_t planned;
  float partial[2][WARPS][ROWS][8];  // sums of one warp, by token or line of a visit
  MoeDecodePlan plan;
};

// Stage and phase of a ring.
struct Ring {
  int stage = 0;
  int phase = 0;
  __device__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

__device__ uint4 none() {
  return make_uint4(0, 0, 0, 0);
}

// Sums of eight rows times all tokens. A lane has eight neighbouring columns of row lane / 4 and of
// token lane / 4: the order of K is free. The instruction multiplies sixteen rows; its upper half
// takes the same eight with other columns, and each half counts in one of two instructions.
struct Sums {
  float lower[4] = {};
  float upper[4] = {};

  __device__ void add(uint4 const& x, uint4 const& w) {
    uint32_t const rows[4] = {w.x, w.y, w.z, w.w};
    ptx::mma_16x8x16(lower, rows, x.x, x.z);
    ptx::mma_16x8x16(upper, rows, x.y, x.w);
  }
  // Of row lane / 4, tokens 2 (lane % 4) and the next
  __device__ float2 total() const { return make_float2(lower[0] + upper[2], lower[1] + upper[3]); }
};

struct Decode {
  DecodeArgs const& a;
  Shared& shared;
  float* mixture;                // shared memory [tiles, tokens, ROWS]
  uint32_t stages, activations;  // shared addresses
  int tile0, tiles;              // of proj, mine

  // This warp has read a stage.
  __device__ static void release(uint64_t const& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(ptx::shared_address(&barrier));
  }
  __device__ static void wait(uint64_t const& barrier, int phase) {
    ptx::barrier_wait(ptx::shared_address(&barrier), phase);
  }
  __device__ void sync() const { ptx::named_barrier(BARRIER, WARPS * 32); }

  // ---- The warp that loads weights

  // Of a visit's expert, each of `size` elements.
  __device__ __nv_bfloat16 const* weights(int visit, void const* const* parts,
                                          void const* of_shared, int64_t size) const {
    if (visit == 0) return static_cast<__nv_bfloat16 const*>(of_shared);
    int const expert = shared.plan.visit_expert[visit];
    int const each = a.p.experts / a.p.parts;
    return static_cast<__nv_bfloat16 const*>(parts[expert / each]) + expert % each * size;
  }

  // Waits for the next stage to be free and announces bytes.
  __device__ uint32_t open(Ring const& ring, int bytes) const {
    uint32_t const full = ptx::shared_address(&shared.full[ring.stage]);
    wait(shared.empty[ring.stage], ring.phase ^ 1);
    if (threadIdx.x % 32 == 0) ptx::barrier_expect(full, bytes);
    __syncwarp();
    return full;
  }

  __device__ void load_unit(int u, Ring& ring) const {
    int const lane = threadIdx.x % 32;
    int const visit = u / a.units;
    int const unit = u - visit * a.units;
    int const row = lane % 2 * a.width + unit * 4 + lane / 2;
    __nv_bfloat16 const* from =
        weights(visit, a.p.fc, a.p.shared_fc, int64_t{2} * a.width * a.hidden) +
        int64_t{row} * a.hidden;
    uint64_t const once = ptx::policy_evict_first();
    for (int begin = 0; begin < a.hidden; begin += FC_COLUMNS, ring.advance(STAGES)) {
      int const bytes = min(FC_COLUMNS, a.hidden - begin) * 2;
      uint32_t const full = open(ring, ROWS * bytes);
      uint32_t const to = stages + ring.stage * STAGE_BYTES + lane * FC_PITCH;
      if (lane < ROWS) ptx::bulk_load(to, from + begin, bytes, full, once);
    }
  }

  __device__ void load_proj(int visit, Ring& ring) const {
    int const lane = threadIdx.x % 32;
    __nv_bfloat16 const* from =
        weights(visit, a.p.proj, a.p.shared_proj, int64_t{a.hidden} * a.width) +
        int64_t{tile0} * ROWS * a.width;
    uint64_t const once = ptx::policy_evict_first();
    for (int tile = 0; tile < tiles; tile += a.stage_tiles) {
      int const rows = min(a.stage_tiles, tiles - tile) * ROWS;
      for (int begin = 0; begin < a.width; begin += a.columns, ring.advance(STAGES)) {
        int const bytes = min(a.columns, a.width - begin) * 2;
        uint32_t const full = open(ring, rows * bytes);
        // Rows lie side by side in memory where the stage takes all of their columns.
        int const each = a.blocks == 1 ? ROWS : 1;
        for (int row = lane * each; row < rows; row += 32 * each) {
          ptx::bulk_load(stages + ring.stage * STAGE_BYTES + row * bytes,
                         from + int64_t{tile * ROWS + row} * a.width + begin, each * bytes, full,
                         once);
        }
      }
    }
  }

  // Weights do not change: the shared expert's need not wait for the previous kernel.
  __device__ void load_weights() const {
    int const lane = threadIdx.x % 32;
    int const ctas = gridDim.x;
    if (a.units <= ctas && lane < tiles) {  // the ring does not fill with fc's
      auto const* from = static_cast<__nv_bfloat16 const*>(a.p.shared_proj);
      ptx::bulk_prefetch(from + int64_t{tile0 + lane} * ROWS * a.width, ROWS * a.width * 2);
    }
    Ring ring;
    int u = blockIdx.x;
    for (; u < a.units; u += ctas) load_unit(u, ring);
    wait(shared.planned, 0);
    int const visits = shared.plan.visits;
    for (; u < visits * a.units; u += ctas) load_unit(u, ring);
    for (int visit = 0; visit < visits; ++visit) load_proj(visit, ring);
  }

  // ---- The warp that loads activations

  // Waits until all of a visit's are in memory; visits before `ready` are. Lanes look ahead.
  __device__ void wait_ready(int visit, int& ready) const {
    while (ready <= visit) {
      int const mine = ready + static_cast<int>(threadIdx.x) % 32;
      bool const exists = mine < shared.plan.visits;
      int const done = exists ? load_acquire(a.ws.ready + mine) : 0;
      unsigned const missing = __ballot_sync(~0u, done < a.units);
      ready += missing == 0 ? 32 : __ffs(static_cast<int>(missing)) - 1;
    }
    __syncwarp();  // what any lane has seen
  }

  __device__ void load_activations() const {
    int const lane = threadIdx.x % 32;
    wait(shared.planned, 0);
    Ring ring;
    int ready = 0;
    for (int visit = 0; visit < shared.plan.visits; ++visit) {
      int const count = __popc(shared.plan.visit_tokens[visit]);
      auto const* from = a.ws.activations + int64_t{shared.plan.visit_place[visit]} * a.width;
      wait_ready(visit, ready);
      for (int tile = 0; tile < tiles; tile += a.stage_tiles) {
        for (int begin = 0; begin < a.width; begin += a.columns) {
          int const chunks = min(a.columns, a.width - begin) / 8;  // of a row
          wait(shared.activations_empty[ring.stage], ring.phase ^ 1);
          uint32_t const to = activations + ring.stage * (TOKENS * a.columns * 2);
          for (int row = 0; row < count; ++row) {
            for (int i = lane; i < chunks; i += 32) {
              ptx::cp_async_16(to + (row * chunks + i) * 16,
                               from + int64_t{row} * a.width + begin + i * 8);
            }
          }
          ptx::cp_async_arrive(ptx::shared_address(&shared.activations_full[ring.stage]));
          ring.advance(a.activation_stages);
        }
      }
    }
  }

  // ---- The warps that multiply

  __device__ void put(Sums const& sums, int turn) const {
    int const lane = threadIdx.x % 32;
    float* to = shared.partial[turn][threadIdx.x / 32][lane / 4] + lane % 4 * 2;
    *reinterpret_cast<float2*>(to) = sums.total();
  }

  // My columns of token lane / 4
  __device__ void load_x(uint4 (&x)[FC_BLOCKS][FC_STEPS]) const {
    int const token = static_cast<int>(threadIdx.x) % 32 / 4;
    int const column = static_cast<int>(threadIdx.x) / 32 * FC_STEPS * STEP;
    auto const* from =
        static_cast<__nv_bfloat16 const*>(a.p.x) + int64_t{token} * a.hidden + threadIdx.x % 4 * 8;
#pragma unroll
    for (int b = 0; b < FC_BLOCKS; ++b) {
#pragma unroll
      for (int i = 0; i < FC_STEPS; ++i) {
        int const at = b * FC_COLUMNS + column + i * STEP;
        bool const inside = token < a.tokens && at < a.hidden;
        x[b][i] = inside ? __ldg(reinterpret_cast<uint4 const*>(from + at)) : none();
      }
    }
  }

  // The activations of a unit from all warps' sums, by one warp: gate and up of token lane / 4,
  // column lane % 4.
  __device__ void finish_unit(int visit, int unit, int turn) const {
    int const lane = threadIdx.x % 32;
    int const token = lane / 4;
    float gate = 0.0f;
    float up = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      gate += shared.partial[turn][w][lane % 4 * 2][token];
      up += shared.partial[turn][w][lane % 4 * 2 + 1][token];
    }
    float const value = clamped_swiglu(gate, up, a.p.swiglu_alpha, a.p.swiglu_limit);
    __nv_bfloat162 const pair = __floats2bfloat162_rn(value, __shfl_down_sync(~0u, value, 1));
    uint32_t const low = reinterpret_cast<uint32_t const&>(pair);
    uint32_t const high = __shfl_down_sync(~0u, low, 2);
    uint32_t const set = shared.plan.visit_tokens[visit];
    if (lane % 4 == 0 && (set >> token & 1) != 0) {
      int const place = shared.plan.visit_place[visit] + MoeDecodePlan::rank(set, token);
      int64_t const at = int64_t{place} * a.width + unit * 4;
      *reinterpret_cast<uint2*>(a.ws.activations + at) = make_uint2(low, high);
    }
    __syncwarp();  // all lanes' stores
    if (lane == 0) ptx::add_release(a.ws.ready + visit, 1);
  }

  __device__ void multiply_fc(Ring& ring, int& turn) const {
    int const lane = threadIdx.x % 32;
    int const warp = threadIdx.x / 32;
    int const column = warp * FC_STEPS * STEP;
    uint4 x[FC_BLOCKS][FC_STEPS];
    load_x(x);
    int const end = shared.plan.visits * a.units;
    int finisher = 0;
    for (int u = blockIdx.x; u < end; u += static_cast<int>(gridDim.x), turn ^= 1) {
      Sums sums;
#pragma unroll
      for (int b = 0; b < FC_BLOCKS; ++b) {
        if (b * FC_COLUMNS >= a.hidden) break;
        wait(shared.full[ring.stage], ring.phase);
        uint32_t const from =
            stages + ring.stage * STAGE_BYTES + lane / 4 * FC_PITCH + column * 2 + lane % 4 * 16;
#pragma unroll
        for (int i = 0; i < FC_STEPS; i += 2) {
          int const at = b * FC_COLUMNS + column + i * STEP;
          if (at >= a.hidden) break;
          bool const two = at + STEP < a.hidden;
          uint4 const w0 = ptx::load_shared(from + i * STEP * 2);
          uint4 const w1 = two ? ptx::load_shared(from + (i + 1) * STEP * 2) : none();
          sums.add(x[b][i], w0);
          sums.add(x[b][i + 1], w1);
        }
        release(shared.empty[ring.stage]);
        ring.advance(STAGES);
      }
      put(sums, turn);
      sync();  // partial; its other half is read
      if (warp == finisher) finish_unit(u / a.units, u % a.units, turn);
      finisher = (finisher + 1) % WARPS;
    }
  }

  // Adds a visit's outputs to the mixture, one warp a tile: always the same one.
  __device__ void finish_tile(int visit, int tile, int first_warp, int step, int parts,
                              int turn) const {
    int const row = static_cast<int>(threadIdx.x) % 32 / 4;
    int const line = static_cast<int>(threadIdx.x) % 4 * 2;  // of the visit; I have two
    float sum[2] = {};
    for (int i = 0; i < parts; ++i) {
      float const* v = shared.partial[turn][first_warp + i * step][row] + line;
      sum[0] += v[0];
      sum[1] += v[1];
    }
    int const count = __popc(shared.plan.visit_tokens[visit]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (line + i >= count) break;
      int const place = shared.plan.visit_place[visit] + line + i;
      float* to = mixture + (tile * a.tokens + shared.plan.place_token[place]) * ROWS + row;
      *to = fmaf(shared.plan.place_weight[place], sum[i], *to);
    }
  }

  // The tiles of a stage are shared out to warps; what is left over cuts the columns into parts.
  __device__ void multiply_proj(Ring& ring, int& turn) const {
    int const lane = threadIdx.x % 32;
    int const warp = threadIdx.x / 32;
    Ring of_activations;
    for (int visit = 0; visit < shared.plan.visits; ++visit) {
      bool const has = lane / 4 < __popc(shared.plan.visit_tokens[visit]);
      for (int first = 0; first < tiles; first += a.stage_tiles, turn ^= 1) {
        int const here = min(a.stage_tiles, tiles - first);
        int const parts = WARPS / here;
        int const part = warp / here;
        Sums sums;
        for (int begin = 0; begin < a.width; begin += a.columns) {
          int const now = min(a.columns, a.width - begin);
          wait(shared.activations_full[of_activations.stage], of_activations.phase);
          wait(shared.full[ring.stage], ring.phase);
          if (part < parts) {
            uint32_t const at = lane / 4 * now * 2 + lane % 4 * 16;
            uint32_t const w =
                stages + ring.stage * STAGE_BYTES + warp % here * ROWS * now * 2 + at;
            uint32_t const x = activations + of_activations.stage * (TOKENS * a.columns * 2) + at;
            for (int i = part; i < now / STEP; i += 2 * parts) {
              bool const two = i + parts < now / STEP;
              uint32_t const near = i * STEP * 2;
              uint32_t const far = (i + parts) * STEP * 2;
              uint4 const w0 = ptx::load_shared(w + near);
              uint4 const w1 = two ? ptx::load_shared(w + far) : none();
              uint4 const x0 = has ? ptx::load_shared(x + near) : none();
              uint4 const x1 = has && two ? ptx::load_shared(x + far) : none();
              sums.add(x0, w0);
              sums.add(x1, w1);
            }
          }
          release(shared.empty[ring.stage]);
          release(shared.activations_empty[of_activations.stage]);
          ring.advance(STAGES);
          of_activations.advance(a.activation_stages);
        }
        put(sums, turn);
        sync();  // partial; its other half is read
        if (warp < here) finish_tile(visit, first + warp, warp, here, parts, turn);
      }
    }
  }

  __device__ void store() const {
    sync();  // mixture
    for (int i = threadIdx.x; i < tiles * a.tokens; i += WARPS * 32) {
      int const tile = i % tiles;
      int const token = i / tiles;
      float const* v = mixture + (tile * a.tokens + token) * ROWS;
      uint32_t out[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        __nv_bfloat162 const pair = __floats2bfloat162_rn(v[2 * j], v[2 * j + 1]);
        out[j] = reinterpret_cast<uint32_t const&>(pair);
      }
      auto* to =
          static_cast<__nv_bfloat16*>(a.p.y) + int64_t{token} * a.hidden + (tile0 + tile) * ROWS;
      *reinterpret_cast<uint4*>(to) = make_uint4(out[0], out[1], out[2], out[3]);
    }
  }
};

// Blocks wait for each other's activations, so all must run at once: one a multiprocessor.
__global__ void __launch_bounds__(BOUND_THREADS, 1)
    sm90_moe_decode(__grid_constant__ DecodeArgs const a) {
  extern __shared__ __align__(128) char dynamic[];
  let_next_kernel_start();  // it gets no place before all blocks of this one have theirs
  constexpr int RINGS = STAGES * STAGE_BYTES + ACTIVATION_BYTES;
  auto& shared = *reinterpret_cast<Shared*>(dynamic + RINGS);
  auto* mixture = reinterpret_cast<float*>(dynamic + RINGS + sizeof(Shared));
  uint32_t const stages = ptx::shared_address(dynamic);
  int const cta = blockIdx.x;
  int const ctas = gridDim.x;
  int const tile0 = a.hidden / ROWS * cta / ctas;
  int const tiles = a.hidden / ROWS * (cta + 1) / ctas - tile0;
  Decode const decode{a, shared, mixture, stages, stages + STAGES * STAGE_BYTES, tile0, tiles};
  auto const init = [](uint64_t const& barrier, int arrivals) {
    ptx::barrier_init(ptx::shared_address(&barrier), arrivals);
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      init(shared.full[i], 1);
      init(shared.empty[i], WARPS);
    }
    for (int i = 0; i < MAX_ACTIVATION_STAGES; ++i) {
      init(shared.activations_full[i], 32);
      init(shared.activations_empty[i], WARPS);
    }
    init(shared.planned, WARPS);
    ptx::barrier_init_fence();
  }
  shared.plan.prepare(a.p);
  for (int i = threadIdx.x; i < tiles * a.tokens * ROWS; i += THREADS) mixture[i] = 0.0f;
  __syncthreads();  // barriers, plan, mixture
  int const warp = threadIdx.x / 32;
  if (warp == WARPS) {
    decode.load_weights();
    return;
  }
  wait_for_previous_kernel();
  if (warp > WARPS) {
    decode.load_activations();
    return;
  }
  shared.plan.make(a.p, a.ws.logits, BARRIER);
  if (threadIdx.x % 32 == 0) ptx::barrier_arrive(ptx::shared_address(&shared.planned));
  Ring ring;
  int turn = 0;
  decode.multiply_fc(ring, turn);
  decode.multiply_proj(ring, turn);
  decode.store();
}

// Bytes of shared memory on `processors` multiprocessors.
int64_t shared_bytes(MoeParams const& p, int processors) {
  int64_t const tiles = ceil_div(p.hidden / ROWS, processors);
  int64_t const mixture = tiles * p.tokens * ROWS * static_cast<int64_t>(sizeof(float));
  return STAGES * STAGE_BYTES + ACTIVATION_BYTES + int64_t{sizeof(Shared)} + mixture;
}

}  // namespace

bool sm90_moe_decode_takes(MoeParams const& p) {
  // Beyond so many bytes the weights' stream is what counts, and launches are cheap beside it.
  constexpr int64_t MOST = 12288;
  if (p.tokens > SM90_MOE_DECODE_TOKENS || p.tokens * p.width > MOST ||
      p.hidden > SM90_MOE_DECODE_HIDDEN || p.experts > SM90_MOE_DECODE_EXPERTS ||
      p.top_k > SM90_MOE_DECODE_TOP_K) {
    return false;
  }
  int processors = 0, most = 0;
  return count_processors(processors) == cudaSuccess &&
         read_attribute(most, cudaDevAttrMaxSharedMemoryPerBlockOptin) == cudaSuccess &&
         shared_bytes(p, processors) <= most;
}

cudaError_t launch_sm90_moe_decode(MoeParams const& p, Sm90MoeWorkspace const& ws,
                                   cudaStream_t stream) {
  int processors = 0;
  cudaError_t status = count_processors(processors);
  if (status != cudaSuccess) return status;
  auto const bytes = static_cast<int>(shared_bytes(p, processors));
  status =
      cudaFuncSetAttribute(sm90_moe_decode, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  return launch_behind(sm90_moe_decode, static_cast<unsigned>(processors), THREADS, bytes, stream,
                       DecodeArgs(p, ws));
}

}  // namespace m3::kernels
