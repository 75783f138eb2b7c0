#include <algorithm>

#include "kernels/carver.h"
#include "kernels/sm90_moe_math.cuh"
#include "kernels/sm90_moe_plan.h"

namespace m3::kernels {
namespace {

bool aligned(void const* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

}  // namespace

int sm90_router_splits(int64_t tokens, int64_t hidden) {
  int64_t const tiles = (tokens + SM90_ROUTER_TOKENS - 1) / SM90_ROUTER_TOKENS;
  int64_t const wanted = std::clamp<int64_t>(256 / tiles, 1, SM90_ROUTER_MAX_SPLITS);
  return static_cast<int>(std::min(wanted, hidden / 64));
}

int64_t sm90_moe_partial_size(int64_t tokens) {
  int64_t const tile_tokens = std::min<int64_t>((tokens + 15) / 16 * 16, SM90_MOE_MAX_TOKENS);
  return SM90_MOE_WEIGHT_ROWS * tile_tokens;
}

size_t sm90_moe_carve(MoeParams const& p, void* base, Sm90MoeWorkspace& ws) {
  int64_t const rows = p.tokens * (p.top_k + 1);
  // Upper bound of splits * tokens over all steps of up to p.tokens tokens.
  int64_t const logit_rows =
      std::min(p.tokens * SM90_ROUTER_MAX_SPLITS, std::max<int64_t>(256 * 64, p.tokens));
  Carver carver(base);
  carver.take(ws.logits, logit_rows * p.experts);
  bool const is_long = p.tokens >= SM90_ROUTER_LONG_TOKENS;
  carver.take(ws.router_parts, is_long ? 3 * p.experts * p.hidden : 0);
  carver.take(ws.expert_ids, p.tokens * p.top_k);
  carver.take(ws.expert_weights, p.tokens * p.top_k);
  carver.take(ws.rows, rows);
  carver.take(ws.places, rows);
  carver.take(ws.expert_begin, p.experts + 2);
  carver.take(ws.arrivals, SM90_MOE_COUNTERS);
  ws.done = ws.arrivals + 2 * SM90_MOE_MAX_CTAS;
  carver.take(ws.ready, SM90_MOE_DECODE_VISITS);
  carver.take(ws.activations, rows * p.width);
  carver.take(ws.outputs, rows * p.hidden / 4);
  carver.take(ws.partials, 2 * SM90_MOE_MAX_CTAS * sm90_moe_partial_size(p.tokens));
  return carver.used();
}

size_t sm90_moe_workspace_bytes(MoeParams const& p) {
  Sm90MoeWorkspace ws{};
  return sm90_moe_carve(p, nullptr, ws);
}

bool sm90_moe_supports(MoeParams const& p) {
  // Offsets into x and the activations are 32-bit numbers of elements.
  int64_t const largest = kSm90MoeSlabTokens * std::max<int64_t>(p.hidden, (p.top_k + 1) * p.width);
  bool suits = largest < int64_t{1} << 32 && p.type == Type::kBfloat16 && p.hidden % 64 == 0 &&
               p.width % 64 == 0 && p.shared_width == p.width && aligned(p.x) && aligned(p.y) &&
               aligned(p.router_weight) && aligned(p.shared_fc) && aligned(p.shared_proj);
  for (int i = 0; i < p.parts; ++i) suits = suits && aligned(p.fc[i]) && aligned(p.proj[i]);
  return suits;
}

}  // namespace m3::kernels
