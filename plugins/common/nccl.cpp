#include "common/nccl.h"

#include "common/dynamic_library.h"
#include "common/error.h"
#include "common/tensors.h"

namespace m3::nccl {
namespace {

// The part of NCCL's C interface that this library calls (nccl.h, stable since 2.10).
constexpr int kFloat32 = 7;
constexpr int kBfloat16 = 9;
constexpr int kSum = 0;

struct Api {
  int (*all_reduce)(void const*, void*, size_t count, int type, int op, void* communicator,
                    cudaStream_t);
  int (*all_gather)(void const*, void*, size_t count, int type, void* communicator, cudaStream_t);
  char const* (*error_string)(int);
};

Api const& api() {
  static Api const loaded = [] {
    void* library = open_library("a tensor-parallel engine", {"libnccl.so.2"});
    Api a{};
    load_symbol(library, "ncclAllReduce", a.all_reduce);
    load_symbol(library, "ncclAllGather", a.all_gather);
    load_symbol(library, "ncclGetErrorString", a.error_string);
    return a;
  }();
  return loaded;
}

int data_type(nvinfer1::DataType type) {
  switch (type) {
    case nvinfer1::DataType::kFLOAT:
      return kFloat32;
    case nvinfer1::DataType::kBF16:
      return kBfloat16;
    default:
      throw Error(format("collectives take f32 and bf16, not %s", type_name(type)));
  }
}

void check(int status, char const* call) {
  M3_CHECK(status == 0, "%s failed: %s", call, api().error_string(status));
}

}  // namespace

void all_reduce(void const* send, void* recv, int64_t count, nvinfer1::DataType type,
                void* communicator, cudaStream_t stream) {
  check(api().all_reduce(send, recv, count, data_type(type), kSum, communicator, stream),
        "ncclAllReduce");
}

void all_gather(void const* send, void* recv, int64_t count, nvinfer1::DataType type,
                void* communicator, cudaStream_t stream) {
  check(api().all_gather(send, recv, count, data_type(type), communicator, stream),
        "ncclAllGather");
}

}  // namespace m3::nccl
