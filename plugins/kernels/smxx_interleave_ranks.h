#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/types.h"

namespace m3::kernels {

// out[row, rank * columns + column] = in[rank, row, column]: what turns a gather into columns.
struct InterleaveRanksParams {
  void const* in;  // T [ranks, rows, columns]
  void* out;       // T [rows, ranks * columns]
  int64_t ranks, rows, columns;
  Type type;  // kFloat32 or kBfloat16
};

cudaError_t launch_interleave_ranks(InterleaveRanksParams const& p, cudaStream_t stream);

}  // namespace m3::kernels
