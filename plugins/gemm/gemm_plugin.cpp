#include "gemm/gemm_plugin.h"

#include <algorithm>

#include "common/creator.h"
#include "common/cublaslt.h"
#include "kernels/smxx_gemm_epilogue.h"
#include "kernels/smxx_skinny_gemm.h"

namespace m3 {

using nvinfer1::DataType;
using nvinfer1::Dims;

namespace {

// Largest slab of fp32 sums that waits for the epilogue; longer inputs go slab by slab.
constexpr int64_t kSlabBytes = int64_t{64} << 20;

struct Sizes {
  int64_t m, n, k;
};

Sizes sizes(Dims const& x, Dims const& weight) {
  M3_CHECK(x.nbDims >= 1, "x is a scalar; it takes at least one dimension");
  int64_t rows = 1;
  for (int32_t i = 0; i + 1 < x.nbDims; ++i) rows *= x.d[i];
  return {rows, dim(weight, 2, 0, "weight"), dim(weight, 2, 1, "weight")};
}

// Decode steps; false when cuBLASLt has to do it.
bool multiply_few_rows(Step const& step, Sizes const& s) {
  if (step.in[0].type != DataType::kBF16) return false;
  kernels::SkinnyGemmParams p{};
  p.x = step.inputs[0];
  p.weight = step.inputs[1];
  p.y = step.outputs[0];
  p.m = s.m;
  p.n = s.n;
  p.k = s.k;
  p.out_type = kernel_type(step.out[0].type);
  if (!kernels::has_skinny_gemm(p)) return false;
  check_launch(kernels::launch_skinny_gemm(p, step.stream), "skinny_gemm");
  return true;
}

int64_t slab_rows(Sizes const& s) {
  int64_t const fits = kSlabBytes / (std::max<int64_t>(s.n, 1) * int64_t{sizeof(float)});
  return std::clamp<int64_t>(fits, 1, std::max<int64_t>(s.m, 1));
}

}  // namespace

TypeTable GemmPlugin::types(int32_t num_inputs) const {
  bool const bias = attributes().has_bias != 0;
  M3_CHECK(num_inputs == 2 + bias, "%d inputs are connected; has_bias=%d takes %d", num_inputs,
           attributes().has_bias, 2 + bias);
  TypeTable table;
  table.ports = {"x", "weight"};
  if (bias) table.ports.push_back("bias");
  table.ports.push_back("y");
  for (DataType type : {DataType::kBF16, DataType::kFLOAT}) {
    std::vector<DataType> row(num_inputs, type);
    row.push_back(attributes().output_dtype == "float32" ? DataType::kFLOAT : type);
    table.rows.push_back(row);
  }
  return table;
}

void GemmPlugin::output_shapes(nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out,
                               nvinfer1::IExprBuilder&) const {
  M3_CHECK(in[0].nbDims >= 1 && in[1].nbDims == 2,
           "x has %d and weight %d dimensions; they take at least 1 and exactly 2", in[0].nbDims,
           in[1].nbDims);
  out[0] = in[0];
  out[0].d[in[0].nbDims - 1] = in[1].d[0];
}

void GemmPlugin::check_shapes(Shapes const& shapes) const {
  Sizes const s = sizes(shapes.in[0], shapes.in[1]);
  M3_CHECK(shapes.in[0].d[shapes.in[0].nbDims - 1] == s.k,
           "x has shape %s and weight %s; the last dimensions must agree",
           to_string(shapes.in[0]).c_str(), to_string(shapes.in[1]).c_str());
  if (attributes().has_bias != 0) {
    M3_CHECK(dim(shapes.in[2], 1, 0, "bias") == s.n, "bias has shape %s; weight %s takes [%lld]",
             to_string(shapes.in[2]).c_str(), to_string(shapes.in[1]).c_str(),
             static_cast<long long>(s.n));
  }
}

// cuBLASLt adds a bias of y's type itself; the rest is ours.
bool GemmPlugin::own_epilogue(DataType type) const {
  bool const widened = type != DataType::kFLOAT && attributes().output_dtype == "float32";
  return attributes().epilogue == "gelu_erf" || (attributes().has_bias != 0 && widened);
}

// fp32 outputs hold their own sums.
bool GemmPlugin::float_sums_in_workspace(DataType type) const {
  return own_epilogue(type) && type != DataType::kFLOAT && attributes().output_dtype == "same";
}

size_t GemmPlugin::workspace_bytes(Shapes const& largest) const {
  WorkspaceLayout layout;
  layout.take(kMatmulWorkspaceBytes);
  if (float_sums_in_workspace(largest.in_types[0])) {
    Sizes const s = sizes(largest.in[0], largest.in[1]);
    layout.take(slab_rows(s) * s.n * int64_t{sizeof(float)});
  }
  return layout.total();
}

void GemmPlugin::enqueue_step(Step const& step) const {
  Sizes const s = sizes(step.in[0].dims, step.in[1].dims);
  if (s.m == 0 || s.n == 0) return;
  M3_CHECK(s.k > 0, "x has shape %s: nothing to sum over", to_string(step.in[0].dims).c_str());
  DataType const type = step.in[0].type;
  bool const has_bias = attributes().has_bias != 0;
  bool const own = own_epilogue(type);
  bool const in_workspace = float_sums_in_workspace(type);
  if (!own && !has_bias && multiply_few_rows(step, s)) return;
  void const* bias = has_bias ? step.inputs[2] : nullptr;
  int64_t const slab = in_workspace ? slab_rows(s) : s.m;

  for (int64_t row = 0; row < s.m; row += slab) {
    int64_t const rows = std::min(slab, s.m - row);
    char* y = step.output<char>(0) + row * s.n * int64_t(type_bytes(step.out[0].type));
    void* sums = in_workspace ? step.scratch(kMatmulWorkspaceBytes) : y;
    Matmul problem{};
    problem.x = step.input<char>(0) + row * s.k * int64_t(type_bytes(type));
    problem.weight = step.inputs[1];
    problem.bias = own ? nullptr : bias;
    problem.y = sums;
    problem.m = rows;
    problem.n = s.n;
    problem.k = s.k;
    problem.in_type = kernel_type(type);
    problem.out_type = own ? kernels::Type::kFloat32 : kernel_type(step.out[0].type);
    matmul(problem, step.workspace, step.stream);
    if (!own) continue;

    kernels::GemmEpilogueParams epilogue{};
    epilogue.sums = static_cast<float const*>(sums);
    epilogue.bias = bias;
    epilogue.out = y;
    epilogue.rows = rows;
    epilogue.cols = s.n;
    epilogue.bias_type = kernel_type(type);
    epilogue.out_type = kernel_type(step.out[0].type);
    epilogue.gelu_erf = attributes().epilogue == "gelu_erf";
    check_launch(kernels::launch_gemm_epilogue(epilogue, step.stream), "gemm_epilogue");
  }
}

}  // namespace m3

M3_DEFINE_CREATOR(gemm, m3::GemmPlugin)
