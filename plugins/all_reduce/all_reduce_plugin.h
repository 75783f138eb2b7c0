#pragma once

#include "common/plugin_base.h"

namespace m3 {

struct AllReduceAttributes {
  int32_t group_size;
};

// y = sum over the ranks of the group of x; any shape, T.
class AllReducePlugin final : public PluginBase<AllReducePlugin, AllReduceAttributes> {
 public:
  using PluginBase::PluginBase;

  static constexpr char const* kName = "M3AllReduce";
  static constexpr FieldSpec<AllReduceAttributes> kFields[] = {
      {"group_size", &AllReduceAttributes::group_size, 2, 1024},
  };

  TypeTable types(int32_t num_inputs) const;
  void output_shapes(nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out,
                     nvinfer1::IExprBuilder& builder) const;
  void check_shapes(Shapes const&) const {}
  void enqueue_step(Step const& step) const;
};

}  // namespace m3
