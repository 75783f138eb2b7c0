#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/types.h"

namespace m3 {

size_t type_bytes(nvinfer1::DataType type);          // throws on the types that no op of ours takes
char const* type_name(nvinfer1::DataType type);      // "bf16", "f32", ...
kernels::Type kernel_type(nvinfer1::DataType type);  // throws likewise

int64_t volume(nvinfer1::Dims const& dims);
std::string to_string(nvinfer1::Dims const& dims);  // "[3, 128]"

// Which dtypes an op takes: one row per allowed combination, inputs then outputs. All linear.
struct TypeTable {
  std::vector<std::string> ports;  // names, inputs then outputs
  std::vector<std::vector<nvinfer1::DataType>> rows;

  // True when some row agrees with the first `count` types.
  bool matches(nvinfer1::DataType const* types, int32_t count) const;
  // "x=f32 weight=f32 y=f32; x=bf16 weight=bf16 y=bf16"
  std::string describe() const;
};

// A dimension of an input, checked: throws Error when the rank is not `rank`.
int64_t dim(nvinfer1::Dims const& dims, int32_t rank, int32_t axis, char const* name);

// Workspace in 256-byte steps: take() returns the offset of the next region.
class WorkspaceLayout {
 public:
  size_t take(int64_t bytes);
  size_t total() const { return total_; }

 private:
  size_t total_ = 0;
};

}  // namespace m3
