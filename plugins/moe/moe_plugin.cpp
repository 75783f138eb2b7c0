#include "moe/moe_plugin.h"

#include <algorithm>

#include "common/creator.h"
#include "kernels/sm90_moe.h"
#include "kernels/this_device.h"

namespace m3 {

using nvinfer1::DataType;
using nvinfer1::Dims;

namespace {

// Positions of the inputs; the fc parts start at kFc, the proj parts follow, then the shared pair.
enum : int32_t { kX, kCuQueryLens, kRouterWeight, kRouterBias, kFc };

// Longer steps run slab by slab, which bounds the workspace.
constexpr int64_t kSlabTokens = 4096;

// The launcher of a compute capability, and how many tokens it takes at once.
struct Launcher {
  cudaError_t (*launch)(kernels::MoeParams const&, void*, cudaStream_t);
  int64_t slab_tokens;
};

Launcher choose_launcher([[maybe_unused]] kernels::MoeParams const& p) {
#ifdef M3_SM90
  static bool const sm90 = kernels::is_sm90();  // a process has GPUs of one kind
  if (sm90 && kernels::sm90_moe_supports(p)) {
    return {kernels::launch_sm90_moe, kernels::kSm90MoeSlabTokens};
  }
#endif
  return {kernels::launch_moe, kSlabTokens};
}

void check_is(Dims const& found, std::vector<int64_t> const& expected, std::string const& name) {
  Dims dims{};
  dims.nbDims = static_cast<int32_t>(expected.size());
  std::copy(expected.begin(), expected.end(), dims.d);
  bool const equal =
      found.nbDims == dims.nbDims && std::equal(dims.d, dims.d + dims.nbDims, found.d);
  M3_CHECK(equal, "input %s has shape %s; the other inputs and attributes make it %s", name.c_str(),
           to_string(found).c_str(), to_string(dims).c_str());
}

}  // namespace

TypeTable MoePlugin::types(int32_t num_inputs) const {
  int32_t const parts = attributes().expert_parts;
  M3_CHECK(num_inputs == kFc + 2 * parts + 2, "%d inputs are connected; expert_parts=%d takes %d",
           num_inputs, parts, kFc + 2 * parts + 2);
  TypeTable table;
  table.ports = {"x", "cu_query_lens", "router_weight", "router_bias"};
  for (char const* stack : {"fc", "proj"}) {
    for (int32_t i = 0; i < parts; ++i) table.ports.push_back(stack + format(".part%d", i));
  }
  table.ports.insert(table.ports.end(), {"shared_fc", "shared_proj", "y"});
  for (DataType type : {DataType::kBF16, DataType::kFLOAT}) {
    std::vector<DataType> row(num_inputs + 1, type);
    row[kCuQueryLens] = DataType::kINT32;
    row[kRouterWeight] = DataType::kFLOAT;
    row[kRouterBias] = DataType::kFLOAT;
    table.rows.push_back(row);
  }
  return table;
}

void MoePlugin::output_shapes(nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out,
                              nvinfer1::IExprBuilder&) const {
  M3_CHECK(in[kX].nbDims == 2, "x has %d dimensions; it takes [tokens, hidden]", in[kX].nbDims);
  out[0] = in[kX];
}

kernels::MoeParams MoePlugin::params(std::vector<Dims> const& in) const {
  int32_t const parts = attributes().expert_parts;
  kernels::MoeParams p{};
  p.tokens = dim(in[kX], 2, 0, "x");
  p.hidden = dim(in[kX], 2, 1, "x");
  p.experts = static_cast<int32_t>(dim(in[kRouterWeight], 2, 0, "router_weight"));
  p.width = dim(in[kFc], 3, 1, "fc.part0") / 2;
  p.shared_width = dim(in[kFc + 2 * parts], 2, 0, "shared_fc") / 2;
  p.parts = parts;
  p.top_k = attributes().top_k;
  p.scale = attributes().routed_scaling_factor;
  p.swiglu_alpha = attributes().swiglu_alpha;
  p.swiglu_limit = attributes().swiglu_limit;
  return p;
}

void MoePlugin::check_shapes(Shapes const& shapes) const {
  auto const& in = shapes.in;
  kernels::MoeParams const p = params(in);
  int32_t const parts = p.parts;
  M3_CHECK(p.experts >= 1 && p.experts <= kernels::kMaxExperts && p.experts % parts == 0,
           "router_weight has shape %s; it takes 1 to %d experts, a multiple of expert_parts=%d",
           to_string(in[kRouterWeight]).c_str(), kernels::kMaxExperts, parts);
  M3_CHECK(p.top_k <= p.experts, "top_k is %d, but there are %d experts", p.top_k, p.experts);
  M3_CHECK(p.hidden > 0 && p.width > 0 && p.shared_width > 0,
           "x has shape %s, fc.part0 %s, shared_fc %s: no width may be 0",
           to_string(in[kX]).c_str(), to_string(in[kFc]).c_str(),
           to_string(in[kFc + 2 * parts]).c_str());
  M3_CHECK(dim(in[kCuQueryLens], 1, 0, "cu_query_lens") >= 1,
           "cu_query_lens is empty; it takes requests + 1 entries");
  check_is(in[kRouterWeight], {p.experts, p.hidden}, "router_weight");
  check_is(in[kRouterBias], {p.experts}, "router_bias");
  for (int32_t i = 0; i < parts; ++i) {
    check_is(in[kFc + i], {p.experts / parts, 2 * p.width, p.hidden}, format("fc.part%d", i));
    check_is(in[kFc + parts + i], {p.experts / parts, p.hidden, p.width}, format("proj.part%d", i));
  }
  check_is(in[kFc + 2 * parts], {2 * p.shared_width, p.hidden}, "shared_fc");
  check_is(in[kFc + 2 * parts + 1], {p.hidden, p.shared_width}, "shared_proj");
}

size_t MoePlugin::workspace_bytes(Shapes const& largest) const {
  // An engine is built where its GPU may be missing: room for whichever launcher will run.
  kernels::MoeParams p = params(largest.in);
  p.type = kernel_type(largest.in_types[kX]);
  int64_t const tokens = p.tokens;
  p.tokens = std::min(tokens, kSlabTokens);
  size_t bytes = kernels::moe_workspace_bytes(p);
  if (kernels::sm90_moe_supports(p)) {
    p.tokens = std::min(tokens, kernels::kSm90MoeSlabTokens);
    bytes = std::max(bytes, kernels::sm90_moe_workspace_bytes(p));
  }
  return bytes;
}

void MoePlugin::enqueue_step(Step const& step) const {
  int32_t const parts = attributes().expert_parts;
  std::vector<Dims> in;
  for (int32_t i = 0; i < kFc + 2 * parts + 2; ++i) in.push_back(step.in[i].dims);
  kernels::MoeParams p = params(in);
  int64_t const tokens = in[kX].d[0];
  DataType const type = step.in[kX].type;
  p.type = kernel_type(type);
  p.real_tokens = step.input<int32_t>(kCuQueryLens) + in[kCuQueryLens].d[0] - 1;
  p.router_weight = step.input<float>(kRouterWeight);
  p.router_bias = step.input<float>(kRouterBias);
  std::copy_n(step.inputs + kFc, parts, p.fc);
  std::copy_n(step.inputs + kFc + parts, parts, p.proj);
  p.shared_fc = step.inputs[kFc + 2 * parts];
  p.shared_proj = step.inputs[kFc + 2 * parts + 1];

  p.x = step.input<char>(kX);
  p.y = step.output<char>(0);
  Launcher const launcher = choose_launcher(p);
  int64_t const row_bytes = p.hidden * static_cast<int64_t>(type_bytes(type));
  for (int64_t first = 0; first < tokens; first += launcher.slab_tokens) {
    p.first_token = first;
    p.tokens = std::min(launcher.slab_tokens, tokens - first);
    p.x = step.input<char>(kX) + first * row_bytes;
    p.y = step.output<char>(0) + first * row_bytes;
    check_launch(launcher.launch(p, step.workspace, step.stream), "moe");
  }
}

}  // namespace m3

M3_DEFINE_CREATOR(moe, m3::MoePlugin)
