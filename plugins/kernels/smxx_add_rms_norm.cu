#include <algorithm>

#include "kernels/packs.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/smxx_add_rms_norm.h"

namespace m3::kernels {
namespace {

constexpr int MAX_PACKS = 3;        // of a thread
constexpr int MAX_THREADS = 1024;   // of a row
constexpr int BUSY_THREADS = 256;   // of a row when there are many: several rows share an SM
constexpr int64_t FEW_ROWS = 1024;  // up to which one row's latency counts, not the bandwidth

// Over the block; every thread gets the result.
__device__ float block_sum(float x) {
  __shared__ float of_warp[MAX_THREADS / 32];
  int const warps = blockDim.x / 32, lane = threadIdx.x % 32;
  x = warp_sum(x);
  if (lane == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_sum(lane < warps ? of_warp[lane] : 0.f);
}

// Grid: one block a row, kPacks packs of 16 bytes a thread.
template <class T, int kPacks>
__global__ void __launch_bounds__(MAX_THREADS)
    add_rms_norm_kernel(__grid_constant__ AddRmsNormParams const p) {
  static_assert(kPacks <= MAX_PACKS, "a thread holds its packs in registers");
  let_next_kernel_start();
  int const packs = p.hidden / Pack<T>::SIZE;
  auto const at = [](int i) { return static_cast<int>(threadIdx.x + i * blockDim.x); };
  float weight[kPacks][Pack<T>::SIZE];  // no kernel writes it: it comes before the wait
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    if (at(i) < packs) load_floats(p.weight + at(i) * Pack<T>::SIZE, weight[i]);
  }
  wait_for_previous_kernel();

  int64_t const to = blockIdx.x;
  int64_t const from = p.rows == nullptr ? to : int64_t{p.rows[to]};
  auto const row = [&](auto* matrix, int64_t index) { return matrix + index * p.hidden; };
  Pack<T> sum[kPacks], added[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    if (at(i) >= packs) continue;
    sum[i] = load_once(row(static_cast<T const*>(p.x), from), at(i));
    if (p.residual != nullptr) {
      added[i] = load_once(row(static_cast<T const*>(p.residual), from), at(i));
    }
  }
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    if (at(i) >= packs) continue;
    float x[Pack<T>::SIZE];
    sum[i].unpack(x);
    if (p.residual != nullptr) {
      float y[Pack<T>::SIZE];
      added[i].unpack(y);
#pragma unroll
      for (int j = 0; j < Pack<T>::SIZE; ++j) x[j] += y[j];
      sum[i] = Pack<T>::of(x);
      if (p.sum != nullptr) sum[i].store(row(static_cast<T*>(p.sum), to), at(i));
      sum[i].unpack(x);  // as rounded
    }
#pragma unroll
    for (int j = 0; j < Pack<T>::SIZE; ++j) squares = fmaf(x[j], x[j], squares);
  }
  float const factor = rsqrtf(block_sum(squares) / static_cast<float>(p.hidden) + p.epsilon);
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    if (at(i) >= packs) continue;
    float x[Pack<T>::SIZE];
    sum[i].unpack(x);
#pragma unroll
    for (int j = 0; j < Pack<T>::SIZE; ++j) x[j] = x[j] * factor * weight[i][j];
    Pack<T>::of(x).store(row(static_cast<T*>(p.normed), to), at(i));
  }
}

template <class T>
cudaError_t launch(AddRmsNormParams const& p, cudaStream_t stream) {
  int64_t const packs = p.hidden / Pack<T>::SIZE;
  int64_t const most = p.num_rows <= FEW_ROWS ? MAX_THREADS : BUSY_THREADS;
  int64_t const each = std::min<int64_t>(ceil_div(packs, most), MAX_PACKS);
  int64_t const threads = ceil_div(ceil_div(packs, each), 32) * 32;
  if (threads > MAX_THREADS) return cudaErrorInvalidValue;
  auto const with = [&](auto kernel) {
    return launch_behind(kernel, dim3(static_cast<unsigned>(p.num_rows)),
                         dim3(static_cast<unsigned>(threads)), 0, stream, p);
  };
  switch (each) {
    case 1:
      return with(add_rms_norm_kernel<T, 1>);
    case 2:
      return with(add_rms_norm_kernel<T, 2>);
    default:
      return with(add_rms_norm_kernel<T, MAX_PACKS>);
  }
}

}  // namespace

cudaError_t launch_add_rms_norm(AddRmsNormParams const& p, cudaStream_t stream) {
  if (p.num_rows == 0) return cudaSuccess;
  if (p.hidden <= 0 || p.hidden % 8 != 0) return cudaErrorInvalidValue;
  return launch_typed(p.type, [&](auto t) { return launch<decltype(t)>(p, stream); });
}

}  // namespace m3::kernels
