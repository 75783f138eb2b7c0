#include <algorithm>

#include "kernels/bulk_copy.cuh"
#include "kernels/mma_sync.cuh"
#include "kernels/numeric.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/smxx_skinny_gemm.h"
#include "kernels/this_device.h"

// Every block of threads takes an equal run of rows of the weight, 16 at a time: the sixteen-row
// operand of mma.sync, with the rows of x as its eight columns. Its warps divide K in pieces of 128
// to 384 channels and each brings its own into a ring of its own, as many as fit, before the kernel
// in front has ended.
namespace m3::kernels {
namespace {

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int MAX_M = 8;
constexpr int TILE = 16;  // rows of the weight
constexpr int MAX_STAGES = 16;
constexpr int PIECES[] = {768, 512, 256};  // bytes, the longest first
constexpr int SHORTEST_PIECE = 256;
constexpr int LEAST_BYTES = 80 << 10;  // under way in a multiprocessor, if there are so many
constexpr int X_PADDING = 64;          // bytes behind a row of x: neighbours lie in other banks

struct Shared {
  float sums[2][WARPS][TILE][MAX_M];  // of every second tile
  uint64_t full[WARPS][MAX_STAGES];
};
constexpr int SHARED_BYTES = static_cast<int>(ceil_div(sizeof(Shared), 128)) * 128;

struct Plan {
  int32_t tile_rows;  // at most TILE
  int32_t stages;     // of each warp
};

__host__ __device__ int64_t x_pitch(int64_t k) {
  return 2 * k + X_PADDING;
}

// A warp's pieces: of every tile of the block those whose number is the warp's, modulo WARPS.
template <int kPiece>
class PieceRing {
 public:
  __device__ PieceRing(SkinnyGemmParams const& p, Plan const& plan, int64_t first, int64_t end,
                       Shared& shared, uint8_t* memory)
      : weight_(static_cast<uint8_t const*>(p.weight)),
        pitch_(2 * p.k),
        plan_(plan),
        tile_(first),
        end_(end),
        num_pieces_(static_cast<int32_t>(2 * p.k / kPiece)),
        piece_(warp()),
        barriers_(shared_address(shared.full[warp()])),
        slots_(shared_address(memory) + warp() * plan.stages * plan.tile_rows * kPiece) {
    if (lane() < plan.stages) init_bulk_barrier(barriers_ + 8 * lane());
    __syncwarp();
    if (piece_ >= num_pieces_) tile_ = end_;  // none for this warp
    for (int i = 0; i < plan.stages; ++i) load();
  }

  // The oldest piece, when it is there.
  __device__ uint32_t wait() const {
    wait_bulk(barriers_ + 8 * read_, turn_);
    return slots_ + read_ * plan_.tile_rows * kPiece;
  }
  // The piece is read: the next one may take its place.
  __device__ void release() {
    if (++read_ == plan_.stages) read_ = 0, turn_ ^= 1;
    __syncwarp();
    load();
  }

 private:
  static __device__ int warp() { return static_cast<int>(threadIdx.x) / 32; }
  static __device__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

  __device__ void load() {
    if (tile_ >= end_) return;
    auto const rows = static_cast<int>(min(int64_t{plan_.tile_rows}, end_ - tile_));
    uint32_t const barrier = barriers_ + 8 * write_;
    if (lane() == 0) expect_bulk(barrier, rows * kPiece);
    __syncwarp();
    if (lane() < rows) {
      copy_bulk(slots_ + (write_ * plan_.tile_rows + lane()) * kPiece,
                weight_ + (tile_ + lane()) * pitch_ + piece_ * kPiece, barrier, kPiece);
    }
    if (++write_ == plan_.stages) write_ = 0;
    piece_ += WARPS;
    if (piece_ >= num_pieces_) piece_ = warp(), tile_ += plan_.tile_rows;
  }

  uint8_t const* weight_;
  int64_t pitch_;
  Plan plan_;
  int64_t tile_, end_;
  int32_t num_pieces_, piece_;
  uint32_t barriers_, slots_;
  int read_ = 0, write_ = 0, turn_ = 0;
};

// Both chunks of 32 channels of a row's 64. Rows of other parity read them in the other order, so
// that no two rows meet in a bank.
__device__ void load_row(uint32_t (&near)[4], uint32_t (&far)[4], uint32_t row, bool odd) {
  uint32_t first[4], second[4];
  load_shared(first, row + (odd ? 64 : 0));
  load_shared(second, row + (odd ? 0 : 64));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    near[i] = odd ? second[i] : first[i];
    far[i] = odd ? first[i] : second[i];
  }
}

// sums += a piece of `rows` rows of the weight times x, in two parts so that products wait less for
// each other; further sums become rubbish. A lane's 16 bytes are eight neighbouring channels: which
// ones meet in a product is free.
template <int kPiece>
__device__ void multiply_piece(float (&sums)[2][4], uint32_t weight, int rows, uint32_t x) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
  auto const address = [&](int row) {
    return weight + min(row, rows - 1) * kPiece + lane % 4 * 16;
  };
  uint32_t const low_row = address(lane / 4), high_row = address(lane / 4 + 8);
  bool const odd = lane / 4 % 2 != 0;
#pragma unroll
  for (int half = 0; half < kPiece; half += 128) {
    uint32_t low[2][4], high[2][4];
    load_row(low[0], low[1], low_row + half, odd);
    load_row(high[0], high[1], high_row + half, odd);
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
      uint32_t b[4];
      load_shared(b, x + half + chunk * 64);
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        uint32_t const a[4] = {low[chunk][i], high[chunk][i], low[chunk][i + 1],
                               high[chunk][i + 1]};
        multiply_add(sums[i / 2], a, b[i], b[i + 1]);
      }
    }
  }
}

// The channels of x that meet the warp's pieces: it need not wait for other warps.
template <int kPiece>
__device__ void load_own_x(SkinnyGemmParams const& p, uint32_t to) {
  constexpr int CHUNKS = kPiece / 16;
  int const warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  auto const row_bytes = static_cast<int>(2 * p.k), pitch = static_cast<int>(x_pitch(p.k));
  auto const* const from = static_cast<uint8_t const*>(p.x);
  for (int piece = warp * kPiece; piece < row_bytes; piece += WARPS * kPiece) {
    for (int i = lane; i < p.m * CHUNKS; i += 32) {
      int const token = i / CHUNKS, at = piece + i % CHUNKS * 16;
      copy_async(to + token * pitch + at, from + token * row_bytes + at, true);
    }
  }
  commit_copies();
  wait_copies<0>();
  __syncwarp();
}

// Adds up what the warps have of a tile and writes it.
template <class T>
__device__ void write_tile(SkinnyGemmParams const& p, float const (&sums)[WARPS][TILE][MAX_M],
                           int64_t first, int64_t end) {
  int const row = static_cast<int>(threadIdx.x) % TILE,
            token = static_cast<int>(threadIdx.x) / TILE;
  if (token >= p.m || first + row >= end) return;
  float sum = 0.f;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) sum += sums[warp][row][token];
  static_cast<T*>(p.y)[token * p.n + first + row] = from_float<T>(sum);
}

template <class T, int kPiece>
__global__ void __launch_bounds__(THREADS, 2)
    skinny_gemm_kernel(__grid_constant__ SkinnyGemmParams const p,
                       __grid_constant__ Plan const plan) {
  extern __shared__ __align__(128) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  uint8_t* const ring_memory = memory + SHARED_BYTES;
  uint32_t const x = shared_address(ring_memory + WARPS * plan.stages * plan.tile_rows * kPiece);
  int const warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  int64_t const begin = p.n * blockIdx.x / gridDim.x, end = p.n * (blockIdx.x + 1) / gridDim.x;
  let_next_kernel_start();
  PieceRing<kPiece> ring(p, plan, begin, end, shared, ring_memory);
  auto const row_bytes = static_cast<int>(2 * p.k), pitch = static_cast<int>(x_pitch(p.k));
  auto const tokens = static_cast<int>(p.m);
  wait_for_previous_kernel();
  load_own_x<kPiece>(p, x);

  uint32_t const own_x = x + min(lane / 4, tokens - 1) * pitch + lane % 4 * 16;
  int parity = 0;
  for (int64_t tile = begin; tile < end; tile += plan.tile_rows, parity ^= 1) {
    float sums[2][4] = {};
    for (int at = warp * kPiece; at < row_bytes; at += WARPS * kPiece) {
      multiply_piece<kPiece>(sums, ring.wait(), plan.tile_rows, own_x + at);
      ring.release();
    }
    auto& of_warp = shared.sums[parity][warp];
    *reinterpret_cast<float2*>(&of_warp[lane / 4][lane % 4 * 2]) = {sums[0][0] + sums[1][0],
                                                                    sums[0][1] + sums[1][1]};
    *reinterpret_cast<float2*>(&of_warp[lane / 4 + 8][lane % 4 * 2]) = {sums[0][2] + sums[1][2],
                                                                        sums[0][3] + sums[1][3]};
    __syncthreads();
    write_tile<T>(p, shared.sums[parity], tile, min(tile + plan.tile_rows, end));
  }
}

bool is_aligned(void const* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

struct Launch {
  int piece;
  Plan plan;  // no stages: x leaves the weights too little shared memory
  int processors;
  int64_t shared_bytes;
};

// False for what the kernel does not take.
bool make_launch(SkinnyGemmParams const& p, Launch& to) {
  if (p.m < 1 || p.m > MAX_M || p.n < 1 || p.k < 1 || 2 * p.k % SHORTEST_PIECE != 0) return false;
  int room = 0;
  if (!is_aligned(p.x) || !is_aligned(p.weight) ||
      compiled_version(skinny_gemm_kernel<float, SHORTEST_PIECE>) < 90 ||
      read_attribute(room, cudaDevAttrMaxSharedMemoryPerBlockOptin) != cudaSuccess ||
      count_processors(to.processors) != cudaSuccess) {
    return false;
  }
  int64_t const rows = ceil_div(p.n, to.processors), tiles = ceil_div(rows, TILE);
  to.plan.tile_rows = static_cast<int32_t>(ceil_div(rows, tiles));
  int64_t const fixed = SHARED_BYTES + p.m * x_pitch(p.k);
  // Copies take their time whatever their size: long ones where every warp has as many and two of
  // them fit.
  for (int const piece : PIECES) {
    int64_t const stage = int64_t{WARPS} * to.plan.tile_rows * piece;
    int64_t const pieces = tiles * ceil_div(2 * p.k, int64_t{WARPS} * piece);  // of the first warp
    int64_t const stages = std::min<int64_t>({pieces, (room - fixed) / stage, MAX_STAGES});
    bool const enough = stages == pieces || (stages >= 2 && stages * stage >= LEAST_BYTES);
    to.piece = piece;
    to.plan.stages = enough ? static_cast<int32_t>(stages) : 0;
    to.shared_bytes = fixed + to.plan.stages * stage;
    if (enough && 2 * p.k % (WARPS * piece) == 0) break;
  }
  return to.plan.stages > 0;
}

template <class T, int kPiece>
cudaError_t launch(SkinnyGemmParams const& p, Launch const& with, cudaStream_t stream) {
  auto const kernel = skinny_gemm_kernel<T, kPiece>;
  auto const bytes = static_cast<int>(with.shared_bytes);
  cudaError_t const status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  return launch_behind(kernel, dim3(with.processors), dim3(THREADS), bytes, stream, p, with.plan);
}

template <class T>
cudaError_t launch(SkinnyGemmParams const& p, Launch const& with, cudaStream_t stream) {
  switch (with.piece) {
    case 768:
      return launch<T, 768>(p, with, stream);
    case 512:
      return launch<T, 512>(p, with, stream);
    default:
      return launch<T, SHORTEST_PIECE>(p, with, stream);
  }
}

}  // namespace

bool has_skinny_gemm(SkinnyGemmParams const& p) {
  Launch with;
  return make_launch(p, with);
}

cudaError_t launch_skinny_gemm(SkinnyGemmParams const& p, cudaStream_t stream) {
  Launch with;
  if (!make_launch(p, with)) return cudaErrorInvalidValue;
  return p.out_type == Type::kFloat32 ? launch<float>(p, with, stream)
                                      : launch<__nv_bfloat16>(p, with, stream);
}

}  // namespace m3::kernels
