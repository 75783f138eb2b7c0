#pragma once

#include "common/plugin_base.h"

namespace m3 {

struct CacheUpdateAttributes {
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t num_index_heads;  // 0: a layer without an index branch
  int32_t head_size;
  int32_t index_head_size;
  int32_t rotary_dim;
  float epsilon;
};

// Norms and rotates q, k, index q and index k; writes K, V and index K into their pages, in place.
class CacheUpdatePlugin final : public PluginBase<CacheUpdatePlugin, CacheUpdateAttributes> {
 public:
  using PluginBase::PluginBase;

  static constexpr char const* kName = "M3CacheUpdate";
  static constexpr FieldSpec<CacheUpdateAttributes> kFields[] = {
      {"num_heads", &CacheUpdateAttributes::num_heads, 1, 1024},
      {"num_kv_heads", &CacheUpdateAttributes::num_kv_heads, 1, 1024},
      {"num_index_heads", &CacheUpdateAttributes::num_index_heads, 0, 1024},
      {"head_size", &CacheUpdateAttributes::head_size, 1},
      {"index_head_size", &CacheUpdateAttributes::index_head_size, 0},
      {"rotary_dim", &CacheUpdateAttributes::rotary_dim, 0},
      {"epsilon", &CacheUpdateAttributes::epsilon, 0, 1},
  };

  void check_attributes() const;
  int32_t num_outputs() const;
  int32_t aliased_input(int32_t output) const;
  TypeTable types(int32_t num_inputs) const;
  void output_shapes(nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out,
                     nvinfer1::IExprBuilder& builder) const;
  void check_shapes(Shapes const& shapes) const;
  void enqueue_step(Step const& step) const;

 private:
  bool has_index() const { return attributes().num_index_heads > 0; }
};

}  // namespace m3
