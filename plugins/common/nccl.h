#pragma once

#include <NvInferRuntime.h>

#include <cstdint>

// NCCL, opened on first use. `communicator` is an ncclComm_t. Each throws Error when libnccl.so.2
// is not found or the call fails.
namespace m3::nccl {

// recv[count] = sum over ranks of send[count]; may be in place.
void all_reduce(void const* send, void* recv, int64_t count, nvinfer1::DataType type,
                void* communicator, cudaStream_t stream);

// recv[ranks, count] = send[count] of each rank.
void all_gather(void const* send, void* recv, int64_t count, nvinfer1::DataType type,
                void* communicator, cudaStream_t stream);

}  // namespace m3::nccl
