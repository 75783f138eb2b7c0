#pragma once

#include "common/plugin_base.h"
#include "kernels/smxx_moe.h"

namespace m3 {

struct MoeAttributes {
  int32_t expert_parts;  // the expert stacks come in so many inputs of [E / parts, ..]
  int32_t top_k;
  float routed_scaling_factor;
  float swiglu_alpha;
  float swiglu_limit;
};

// Inputs: x [N, H] T, cu_query_lens int32 [R+1], router_weight f32 [E, H], router_bias f32 [E],
// fc parts T [E/k, 2I, H], proj parts T [E/k, H, I], shared_fc T [2Is, H], shared_proj T [H, Is].
// Output y [N, H] T; rows at or beyond cu_query_lens[R] are zero.
class MoePlugin final : public PluginBase<MoePlugin, MoeAttributes> {
 public:
  using PluginBase::PluginBase;

  static constexpr char const* kName = "M3MoE";
  static constexpr FieldSpec<MoeAttributes> kFields[] = {
      {"expert_parts", &MoeAttributes::expert_parts, 1, kernels::kMaxExpertParts},
      {"top_k", &MoeAttributes::top_k, 1, kernels::kMaxTopK},
      {"routed_scaling_factor", &MoeAttributes::routed_scaling_factor, 0, 1e6},
      {"swiglu_alpha", &MoeAttributes::swiglu_alpha, 0, 1e6},
      {"swiglu_limit", &MoeAttributes::swiglu_limit, 0, 1e30},
  };

  TypeTable types(int32_t num_inputs) const;
  void output_shapes(nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out,
                     nvinfer1::IExprBuilder& builder) const;
  void check_shapes(Shapes const& shapes) const;
  size_t workspace_bytes(Shapes const& largest) const;
  void enqueue_step(Step const& step) const;

 private:
  // Everything of the params that shapes and attributes decide.
  kernels::MoeParams params(std::vector<nvinfer1::Dims> const& in) const;
};

}  // namespace m3
