#pragma once

#include <climits>

#include "kernels/mma_sync.cuh"
#include "kernels/paged_decode_schedule.cuh"

// The decode kernel's shared memory and how queries, keys and values get there.
namespace m3::kernels::paged_decode {

using Bf16 = __nv_bfloat16;

constexpr int WARPS = 4;  // that share the keys of a tile
constexpr int TILE = kDecodeTile;
constexpr int CHUNKS = kHeadSize / 8;             // 16-byte chunks of a key
constexpr int TILE_BYTES = TILE * kHeadSize * 2;  // of K, and of V

// kMTiles tiles of 16 query rows: row = token of the item * group + query head of the KV head.
template <int kMTiles>
struct Shape {
  static constexpr int ROWS = 16 * kMTiles;
  static constexpr int STAGES = kMTiles == 1 ? 3 : 4;
  static constexpr int BLOCKS_PER_SM = kMTiles == 1 ? 2 : 1;
  static constexpr int ROW_WARPS = kMTiles == 1 ? 1 : 2;  // times WARPS
  static constexpr int WARP_TILES = kMTiles / ROW_WARPS;
  static constexpr int THREADS = 32 * WARPS * ROW_WARPS;
};

template <int kMTiles>
struct __align__(128) DecodeShared {
  using S = Shape<kMTiles>;
  uint8_t k[S::STAGES][TILE_BYTES];
  uint8_t v[S::STAGES][TILE_BYTES];
  uint8_t q[S::STAGES][S::ROWS * kHeadSize * 2];  // a ring of items: each may have only one tile
  uint8_t weights[S::ROWS * TILE * 2];
  float maxima[WARPS][S::ROWS];
  float sums[WARPS][S::ROWS];
  int32_t remaining[S::STAGES];  // keys that the item's last token sees from the tile's first on
};

// Brings tiles into shared memory ahead of their use. All warps keep the same state.
template <int kMTiles>
class Loader {
  using S = Shape<kMTiles>;

 public:
  __device__ Loader(PagedDecodeParams const& p, DecodeCursor const& cursor,
                    DecodeShared<kMTiles>& shared)
      : p_(p), cursor_(cursor), ahead_(cursor), shared_(shared) {
    if (is_selected()) {
      next_ids_ = read_ids(cursor_.item());
    } else {
      next_pages_ = read_pages(cursor_.item(), cursor_.tile() / kTilesPerPage / 32);
    }
    open_item();
  }

  __device__ void load(int stage) {
    int32_t const tile = cursor_.tile();
    if (new_item_) {
      load_queries();
    } else if (is_selected() && !pages_ahead_) {
      read_next_pages();  // the ids have had a tile's time to arrive
    }
    if (tile % kTilesPerPage == 0 || new_item_) next_page(tile / kTilesPerPage);
    new_item_ = false;
    int const half = tile % kTilesPerPage * TILE;
    int32_t const remaining = page_ < 0 ? INT_MIN / 2 : remaining_ - half;
    if (threadIdx.x == 0) shared_.remaining[stage] = remaining;
    if (remaining > 0) {
      int const row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
      DecodeView const& view = p_.view;
      int64_t const id = int64_t{page_} * view.ids_per_page + head() * view.ids_per_head;
      int64_t const first = id * view.page_stride + head() * view.head_stride +
                            (half + row) * view.token_stride + chunk * 8;
      auto const* const keys = static_cast<Bf16 const*>(view.keys) + first;
      auto const* const values = static_cast<Bf16 const*>(view.values) + first;
      uint32_t const at = swizzled<CHUNKS>(row, chunk);
      uint32_t const k = shared_address(shared_.k[stage]) + at;
      uint32_t const v = shared_address(shared_.v[stage]) + at;
      constexpr int STEP = S::THREADS / CHUNKS;  // 8 or 16 keys: the swizzle repeats
#pragma unroll
      for (int i = 0; i < TILE / STEP; ++i) {
        copy_async(k + i * STEP * CHUNKS * 16, keys + i * STEP * view.token_stride,
                   row + i * STEP < remaining);
      }
#pragma unroll
      for (int i = 0; i < TILE / STEP; ++i) {
        copy_async(v + i * STEP * CHUNKS * 16, values + i * STEP * view.token_stride,
                   row + i * STEP < remaining);
      }
    }
  }

  __device__ void advance() {
    if (cursor_.advance()) open_item();
  }

 private:
  __device__ int head() const { return cursor_.item().head; }
  __device__ bool is_selected() const { return p_.block_ids != nullptr; }
  __device__ static int lane() { return threadIdx.x % 32; }

  // A lane's selected block, and the page of the block it holds; -1 for what counts for nothing.
  __device__ int32_t read_ids(DecodeItem const& item) const {
    int64_t const row = int64_t{item.head} * p_.tokens.num_tokens + item.first_token;
    return lane() < p_.top_k ? p_.block_ids[row * p_.top_k + lane()] : -1;
  }
  __device__ void read_next_pages() {
    DecodeItem const& item = ahead_.item();
    bool const visible = next_ids_ >= 0 && next_ids_ <= (item.length - 1) / kBlockSize;
    next_pages_ = visible ? page_of(p_.tokens, item.request, next_ids_) : -1;
    pages_ahead_ = true;
  }

  // Pages 32 * part.. of an item that has all blocks, one a lane.
  __device__ int32_t read_pages(DecodeItem const& item, int32_t part) const {
    return page_of(p_.tokens, item.request, part * 32 + lane());
  }

  // What the item needs to know was read while the one before it was loaded.
  __device__ void open_item() {
    new_item_ = true;
    ++num_items_;
    if (!is_selected()) {
      ahead_.next_item();
      return;
    }
    if (!pages_ahead_) read_next_pages();
    ids_ = next_ids_;
    pages_ = next_pages_;
    unread_ = __ballot_sync(~0u, pages_ >= 0);
    for (int i = cursor_.tile() / kTilesPerPage; i > 0; --i) unread_ &= unread_ - 1;
    ahead_.next_item();
    next_ids_ = read_ids(ahead_.item());
    pages_ahead_ = false;
  }

  __device__ void next_page(int32_t index) {
    DecodeItem const& item = cursor_.item();
    if (is_selected()) {
      page_ = -1;
      if (unread_ == 0) return;
      int const at = __ffs(unread_) - 1;
      unread_ &= unread_ - 1;
      page_ = __shfl_sync(~0u, pages_, at);
      remaining_ = item.length - __shfl_sync(~0u, ids_, at) * kBlockSize;
      return;
    }
    if (index % 32 == 0 || new_item_) {
      pages_ = next_pages_;
      int32_t const part = index / 32 + 1;
      bool const same = part * 32 * kTilesPerPage < item.num_tiles;
      next_pages_ = same ? read_pages(item, part) : read_pages(ahead_.item(), 0);
    }
    page_ = __shfl_sync(~0u, pages_, index % 32);
    remaining_ = item.length - index * kBlockSize;
  }

  __device__ void load_queries() {
    DecodeItem const& item = cursor_.item();
    int const group = p_.num_heads / p_.num_kv_heads;
    uint32_t const to = shared_address(shared_.q[num_items_ % S::STAGES]);
    for (int i = threadIdx.x; i < S::ROWS * CHUNKS; i += S::THREADS) {
      int const row = i / CHUNKS, chunk = i % CHUNKS;
      bool const valid = row < item.num_tokens * group;
      int const token = valid ? item.first_token + row / group : item.first_token;
      int const query_head = item.head * group + (valid ? row % group : 0);
      auto const* const from = static_cast<Bf16 const*>(p_.q) +
                               (int64_t{token} * p_.num_heads + query_head) * kHeadSize + chunk * 8;
      copy_async(to + swizzled<CHUNKS>(row, chunk), from, valid);
    }
  }

  PagedDecodeParams const& p_;
  DecodeCursor cursor_;
  DecodeCursor ahead_;  // at the item behind cursor_'s
  DecodeShared<kMTiles>& shared_;
  bool new_item_ = false;
  int num_items_ = -1;
  int32_t ids_ = -1, pages_ = -1;
  int32_t next_ids_ = -1, next_pages_ = -1;
  bool pages_ahead_ = false;
  unsigned unread_ = 0;
  int32_t page_ = -1;
  int32_t remaining_ = 0;
};

}  // namespace m3::kernels::paged_decode
