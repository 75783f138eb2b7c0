#include "cache_update/cache_update_plugin.h"

#include "common/creator.h"
#include "common/paged_inputs.h"
#include "kernels/smxx_cache_update.h"

namespace m3 {

using kernels::kHeadSize;
using nvinfer1::DataType;
using nvinfer1::Dims;

namespace {

enum Input : int32_t {
  kQkv,
  kPositionIds,
  kPacked,
  kKvCache = kPacked + kPackedInputs,
  kInvFreq,
  kQNorm,
  kKNorm,
  kDenseInputs,  // the KV scale of a layer without an index branch
  kIndexCache = kDenseInputs,
  kIndexQNorm,
  kIndexKNorm,
  kSparseInputs,  // its scales: KV, then index
};

enum Output : int32_t { kQ, kKvCacheOut, kIndexQ, kIndexCacheOut };

}  // namespace

void CacheUpdatePlugin::check_attributes() const {
  auto const& a = attributes();
  check_is_128(a.head_size, kName, "head_size");
  if (has_index()) check_is_128(a.index_head_size, kName, "index_head_size");
  M3_CHECK(a.num_heads % a.num_kv_heads == 0,
           "%s: attribute 'num_heads' is %d; it takes a multiple of num_kv_heads, %d", kName,
           a.num_heads, a.num_kv_heads);
  M3_CHECK(a.rotary_dim % 16 == 0 && a.rotary_dim <= kHeadSize,
           "%s: attribute 'rotary_dim' is %d; it takes a multiple of 16 up to %d", kName,
           a.rotary_dim, kHeadSize);
}

int32_t CacheUpdatePlugin::num_outputs() const {
  return has_index() ? 4 : 2;
}

int32_t CacheUpdatePlugin::aliased_input(int32_t output) const {
  return output == kKvCacheOut ? kKvCache : output == kIndexCacheOut ? kIndexCache : -1;
}

TypeTable CacheUpdatePlugin::types(int32_t num_inputs) const {
  PortTypes ports{{"qkv", "position_ids"}, "Tiiii", {"q", "kv_cache_out"}, "TK"};
  ports.input_names.insert(ports.input_names.end(), kPackedPorts.begin(), kPackedPorts.end());
  auto const add = [](auto& to, std::vector<std::string> const& names) {
    to.insert(to.end(), names.begin(), names.end());
  };
  add(ports.input_names, {"kv_cache", "inv_freq", "q_norm", "k_norm"});
  ports.inputs += "Kfff";
  if (has_index()) {
    add(ports.input_names, {"index_cache", "index_q_norm", "index_k_norm"});
    ports.inputs += "Xff";
    add(ports.output_names, {"index_q", "index_cache_out"});
    ports.outputs += "TX";
  }
  return ports.table(num_inputs);
}

void CacheUpdatePlugin::output_shapes(nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out,
                                      nvinfer1::IExprBuilder& builder) const {
  auto const heads = [&](int32_t count) {
    nvinfer1::DimsExprs dims{};
    dims.nbDims = 3;
    dims.d[0] = in[kQkv].d[0];
    dims.d[1] = builder.constant(count);
    dims.d[2] = builder.constant(kHeadSize);
    return dims;
  };
  out[kQ] = heads(attributes().num_heads);
  out[kKvCacheOut] = in[kKvCache];
  if (!has_index()) return;
  out[kIndexQ] = heads(attributes().num_index_heads);
  out[kIndexCacheOut] = in[kIndexCache];
}

void CacheUpdatePlugin::check_shapes(Shapes const& shapes) const {
  auto const& a = attributes();
  Dims const& qkv = shapes.in[kQkv];
  int64_t const tokens = dim(qkv, 2, 0, "qkv");
  int64_t const rows = a.num_heads + 2 * a.num_kv_heads + (has_index() ? a.num_index_heads + 1 : 0);
  M3_CHECK(qkv.d[1] == rows * kHeadSize,
           "qkv has shape %s; %d query, %d KV and %d index heads of %d take [tokens, %lld]",
           to_string(qkv).c_str(), a.num_heads, a.num_kv_heads, a.num_index_heads, kHeadSize,
           static_cast<long long>(rows * kHeadSize));
  check_vector(shapes.in[kPositionIds], tokens, "position_ids");
  check_packed(shapes, kPacked);
  M3_CHECK(kv_heads(shapes.in[kKvCache]) == a.num_kv_heads,
           "kv_cache has shape %s; attribute 'num_kv_heads' is %d",
           to_string(shapes.in[kKvCache]).c_str(), a.num_kv_heads);
  check_vector(shapes.in[kInvFreq], a.rotary_dim / 2, "inv_freq");
  check_vector(shapes.in[kQNorm], kHeadSize, "q_norm");
  check_vector(shapes.in[kKNorm], kHeadSize, "k_norm");
  if (has_index()) {
    check_index_cache(shapes.in[kIndexCache]);
    M3_CHECK(shapes.in[kIndexCache].d[0] == shapes.in[kKvCache].d[0],
             "index_cache has shape %s and kv_cache %s; both take the same pages",
             to_string(shapes.in[kIndexCache]).c_str(), to_string(shapes.in[kKvCache]).c_str());
    check_vector(shapes.in[kIndexQNorm], kHeadSize, "index_q_norm");
    check_vector(shapes.in[kIndexKNorm], kHeadSize, "index_k_norm");
  }
  for (size_t i = has_index() ? kSparseInputs : kDenseInputs; i < shapes.in.size(); ++i) {
    check_vector(shapes.in[i], 1, "a cache scale");
  }
}

void CacheUpdatePlugin::enqueue_step(Step const& step) const {
  auto const& a = attributes();
  int32_t const first_scale = has_index() ? kSparseInputs : kDenseInputs;
  DataType const kv_type = step.in[kKvCache].type;
  M3_CHECK(step.inputs[kKvCache] == step.outputs[kKvCacheOut],
           "kv_cache and kv_cache_out lie at different addresses; bind both to one");

  kernels::CacheUpdateParams p{};
  p.tokens = packed_tokens(step, kPacked, step.in[kQkv].dims.d[0]);
  p.qkv = step.inputs[kQkv];
  p.position_ids = step.input<int32_t>(kPositionIds);
  p.kv_cache = step.outputs[kKvCacheOut];
  p.kv_scale = cache_scale(step, kv_type, first_scale);
  p.inv_freq = step.input<float>(kInvFreq);
  p.q_norm = step.input<float>(kQNorm);
  p.k_norm = step.input<float>(kKNorm);
  p.q = step.outputs[kQ];
  p.num_heads = a.num_heads;
  p.num_kv_heads = a.num_kv_heads;
  p.num_index_heads = a.num_index_heads;
  p.rotary_dim = a.rotary_dim;
  p.epsilon = a.epsilon;
  p.type = kernel_type(step.in[kQkv].type);
  if (has_index()) {
    M3_CHECK(step.inputs[kIndexCache] == step.outputs[kIndexCacheOut],
             "index_cache and index_cache_out lie at different addresses; bind both to one");
    int32_t const index_scale = first_scale + (kv_type == DataType::kFP8 ? 1 : 0);
    p.index_cache = step.outputs[kIndexCacheOut];
    p.index_scale = cache_scale(step, step.in[kIndexCache].type, index_scale);
    p.index_q_norm = step.input<float>(kIndexQNorm);
    p.index_k_norm = step.input<float>(kIndexKNorm);
    p.index_q = step.outputs[kIndexQ];
  }
  check_launch(kernels::launch_cache_update(p, step.stream), "cache_update");
}

}  // namespace m3

M3_DEFINE_CREATOR(cache_update, m3::CacheUpdatePlugin)
