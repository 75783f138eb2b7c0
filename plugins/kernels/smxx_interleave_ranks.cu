#include <algorithm>

#include "kernels/numeric.cuh"
#include "kernels/smxx_interleave_ranks.h"

namespace m3::kernels {
namespace {

constexpr int THREADS = 256;

template <class T>
__global__ void __launch_bounds__(THREADS)
    interleave_ranks(T const* __restrict__ in, T* __restrict__ out, int64_t ranks, int64_t rows,
                     int64_t columns) {
  int64_t const count = ranks * rows * columns;
  int64_t const step = int64_t{gridDim.x} * THREADS;
  for (int64_t i = int64_t{blockIdx.x} * THREADS + threadIdx.x; i < count; i += step) {
    int64_t const column = i % columns;
    int64_t const rank = i / columns % ranks;
    int64_t const row = i / columns / ranks;
    out[i] = in[(rank * rows + row) * columns + column];
  }
}

template <class T>
cudaError_t launch(InterleaveRanksParams const& p, cudaStream_t stream) {
  int64_t const count = p.ranks * p.rows * p.columns;
  auto const blocks = static_cast<unsigned>(std::min<int64_t>(ceil_div(count, THREADS), 1 << 16));
  interleave_ranks<T><<<blocks, THREADS, 0, stream>>>(
      static_cast<T const*>(p.in), static_cast<T*>(p.out), p.ranks, p.rows, p.columns);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_interleave_ranks(InterleaveRanksParams const& p, cudaStream_t stream) {
  if (p.ranks == 0 || p.rows == 0 || p.columns == 0) return cudaSuccess;
  return launch_typed(p.type, [&](auto t) { return launch<decltype(t)>(p, stream); });
}

}  // namespace m3::kernels
