#pragma once

#include <algorithm>

#include "kernels/prefill_select.h"

// What the prefill selections share: scores go to the workspace in rounds, each followed by the
// selection of its rows.
namespace m3::kernels {

constexpr int kSelectRows = 256;   // query rows (token, index head) of a tile
constexpr int kPagesPerStore = 4;  // scores that a lane stores at once

// Scores of the tokens [first, end).
struct SelectRound {
  int32_t first;
  int32_t end;
  int32_t pitch;  // floats between the rows of scores, a multiple of kPagesPerStore
  float* scores;  // [(end - first) * Hi, pitch]
};

// Selects for every row of the round. Scores are read only of blocks in front of the row's forced
// ones, and only when it sees more than top_k blocks.
cudaError_t launch_select_top(BlockSelectParams const& p, SelectRound const& round,
                              cudaStream_t stream);

// Tokens in front of the decode rows, padding included; negative when decode rows claim too many.
inline int64_t context_tokens(BlockSelectParams const& p) {
  return int64_t{p.tokens.num_tokens} - p.num_decode_requests * p.decode_length;
}

// score(round) launches a kernel that writes the scores which launch_select_top reads.
template <class Score>
cudaError_t select_in_rounds(BlockSelectParams const& p, void* workspace, cudaStream_t stream,
                             Score const& score) {
  if (!has_prefill_select(p.type, p.num_index_heads) || p.top_k > kMaxTopK) {
    return cudaErrorInvalidValue;
  }
  int64_t const tokens = context_tokens(p);
  if (tokens < 0) return cudaErrorInvalidValue;
  int64_t const tile = kSelectRows / p.num_index_heads;
  auto const round_up = [](int64_t x, int64_t to) { return (x + to - 1) / to * to; };
  int64_t const pitch = round_up(std::max(p.tokens.max_pages, 1), kPagesPerStore);
  int64_t const token_bytes = p.num_index_heads * pitch * int64_t{sizeof(float)};
  int64_t const fitting =
      prefill_select_workspace_bytes(1 << 30, p.num_index_heads, p.tokens.max_pages) / token_bytes /
      tile * tile;
  int64_t const rounds = (tokens + fitting - 1) / fitting;
  int64_t const step = round_up((tokens + rounds - 1) / rounds, tile);
  for (int64_t at = 0; at < tokens; at += step) {
    SelectRound const round{static_cast<int32_t>(at),
                            static_cast<int32_t>(std::min(at + step, tokens)),
                            static_cast<int32_t>(pitch), static_cast<float*>(workspace)};
    // With so few blocks every row takes all that it sees.
    if (p.tokens.max_pages > p.top_k) {
      if (cudaError_t const status = score(round); status != cudaSuccess) return status;
    }
    cudaError_t const status = launch_select_top(p, round, stream);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace m3::kernels
