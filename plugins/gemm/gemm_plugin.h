#pragma once

#include <string>

#include "common/plugin_base.h"

namespace m3 {

struct GemmAttributes {
  int32_t has_bias;
  std::string epilogue;      // "none" or "gelu_erf"
  std::string output_dtype;  // "same" as x, or "float32"
};

// y [.., N] = act(x [.., K] * weight [N, K]^T + bias [N]). fp32 inside, rounded once.
class GemmPlugin final : public PluginBase<GemmPlugin, GemmAttributes> {
 public:
  using PluginBase::PluginBase;

  static constexpr char const* kName = "M3Gemm";
  static constexpr FieldSpec<GemmAttributes> kFields[] = {
      {"has_bias", &GemmAttributes::has_bias, 0, 1},
      {"epilogue", &GemmAttributes::epilogue, 0, 0, "none|gelu_erf"},
      {"output_dtype", &GemmAttributes::output_dtype, 0, 0, "same|float32"},
  };

  TypeTable types(int32_t num_inputs) const;
  void output_shapes(nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out,
                     nvinfer1::IExprBuilder& builder) const;
  void check_shapes(Shapes const& shapes) const;
  size_t workspace_bytes(Shapes const& largest) const;
  void enqueue_step(Step const& step) const;

 private:
  bool own_epilogue(nvinfer1::DataType type) const;
  bool float_sums_in_workspace(nvinfer1::DataType type) const;
};

}  // namespace m3
