#pragma once

#include "common/plugin_base.h"

namespace m3 {

struct AddRmsNormAttributes {
  int32_t has_residual;
  int32_t has_rows;
  float epsilon;
};

// normed = rms norm of x + residual, and that sum; or normed alone, of chosen rows or without a
// residual.
class AddRmsNormPlugin final : public PluginBase<AddRmsNormPlugin, AddRmsNormAttributes> {
 public:
  using PluginBase::PluginBase;

  static constexpr char const* kName = "M3AddRmsNorm";
  static constexpr FieldSpec<AddRmsNormAttributes> kFields[] = {
      {"has_residual", &AddRmsNormAttributes::has_residual, 0, 1},
      {"has_rows", &AddRmsNormAttributes::has_rows, 0, 1},
      {"epsilon", &AddRmsNormAttributes::epsilon, 0, 1},
  };

  int32_t num_outputs() const { return writes_sum() ? 2 : 1; }
  TypeTable types(int32_t num_inputs) const;
  void output_shapes(nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out,
                     nvinfer1::IExprBuilder& builder) const;
  void check_shapes(Shapes const& shapes) const;
  void enqueue_step(Step const& step) const;

 private:
  bool has_residual() const { return attributes().has_residual != 0; }
  bool has_rows() const { return attributes().has_rows != 0; }
  bool writes_sum() const { return has_residual() && !has_rows(); }
  int32_t weight_input() const { return has_residual() ? 2 : 1; }
};

}  // namespace m3
