#include "common/tensors.h"

#include <algorithm>

#include "common/error.h"

namespace m3 {

using nvinfer1::DataType;
using nvinfer1::Dims;

size_t type_bytes(DataType type) {
  switch (type) {
    case DataType::kFLOAT:
    case DataType::kINT32:
      return 4;
    case DataType::kBF16:
      return 2;
    case DataType::kFP8:
      return 1;
    default:
      throw Error(format("no op of this library takes tensors of %s", type_name(type)));
  }
}

char const* type_name(DataType type) {
  switch (type) {
    case DataType::kFLOAT:
      return "f32";
    case DataType::kHALF:
      return "f16";
    case DataType::kINT8:
      return "int8";
    case DataType::kINT32:
      return "int32";
    case DataType::kBOOL:
      return "bool";
    case DataType::kUINT8:
      return "uint8";
    case DataType::kFP8:
      return "e4m3";
    case DataType::kBF16:
      return "bf16";
    case DataType::kINT64:
      return "int64";
    default:
      return "an unknown type";
  }
}

kernels::Type kernel_type(DataType type) {
  switch (type) {
    case DataType::kFLOAT:
      return kernels::Type::kFloat32;
    case DataType::kBF16:
      return kernels::Type::kBfloat16;
    case DataType::kFP8:
      return kernels::Type::kFloat8E4m3;
    default:
      throw Error(format("no kernel of this library computes on %s", type_name(type)));
  }
}

int64_t volume(Dims const& dims) {
  int64_t n = 1;
  for (int32_t i = 0; i < dims.nbDims; ++i) n *= dims.d[i];
  return n;
}

std::string to_string(Dims const& dims) {
  std::string text = "[";
  for (int32_t i = 0; i < dims.nbDims; ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(dims.d[i]);
  }
  return text + "]";
}

bool TypeTable::matches(DataType const* types, int32_t count) const {
  return std::any_of(rows.begin(), rows.end(), [&](auto const& row) {
    return count <= static_cast<int32_t>(row.size()) &&
           std::equal(types, types + count, row.begin());
  });
}

std::string TypeTable::describe() const {
  std::string text;
  for (auto const& row : rows) {
    if (!text.empty()) text += "; ";
    for (size_t i = 0; i < row.size(); ++i) {
      text += (i > 0 ? " " : "") + ports.at(i) + "=" + type_name(row[i]);
    }
  }
  return text;
}

int64_t dim(Dims const& dims, int32_t rank, int32_t axis, char const* name) {
  M3_CHECK(dims.nbDims == rank, "input %s has shape %s; it takes %d dimensions", name,
           to_string(dims).c_str(), rank);
  return dims.d[axis];
}

size_t WorkspaceLayout::take(int64_t bytes) {
  size_t const offset = total_;
  total_ += (static_cast<size_t>(std::max<int64_t>(bytes, 0)) + 255) / 256 * 256;
  return offset;
}

}  // namespace m3
