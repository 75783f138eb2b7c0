#pragma once

#include "kernels/paged_decode_math.cuh"
#include "kernels/paged_decode_schedule.cuh"

// The decode kernel's shared memory and how keys and values get there.
namespace m3::kernels::paged_decode {

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int MAX_STAGES = 3;
constexpr int WARP_BYTES = 8192;  // of a stage: keys and values, later the warp's result
constexpr int STAGE_BYTES = WARPS * WARP_BYTES;
static_assert(WARP_BYTES == 16 * kHeadSize * sizeof(float));

// kRowWarps tiles of 16 query rows (row = token of the item * group + query head of the KV head), one
// a warp of a team. A team takes one slice of every page, on its own through its own ring of stages.
template <class Cache, int kRowWarps>
struct Shape {
  static constexpr int ROWS = 16 * kRowWarps;
  static constexpr int TEAMS = WARPS / kRowWarps;
  static constexpr int TEAM_THREADS = 32 * kRowWarps;
  static constexpr int KEYS = Products<Cache>::KEYS * kRowWarps;  // of a slice
  static constexpr int SLICES = kBlockSize / KEYS;                // of a page
  static constexpr int PAGES = TEAMS / SLICES;                    // at once
  static constexpr int SLICE_BYTES = KEYS * Products<Cache>::CHUNKS * 16;
  static_assert(2 * SLICE_BYTES == kRowWarps * WARP_BYTES && PAGES >= 1);
};

// The dynamic shared memory holds the stages, then this.
template <int kRowWarps>
struct alignas(128) DecodeShared {
  static constexpr int TEAMS = WARPS / kRowWarps;
  float maxima[TEAMS][16 * kRowWarps];
  float sums[TEAMS][16 * kRowWarps];
  int32_t last_stage[TEAMS];
  // Keys from the slice's first on that the item's last token sees; LAST_SLICE when it ends a segment.
  int32_t slices[WARPS][MAX_STAGES];
};
constexpr int32_t LAST_SLICE = 1 << 16;

struct Team {
  int index, thread, row_warp;

  __device__ explicit Team(int row_warps)
      : index(threadIdx.x / 32 / row_warps),
        thread(threadIdx.x % (32 * row_warps)),
        row_warp(threadIdx.x / 32 % row_warps) {}
};

template <int kRowWarps>
__device__ void team_sync(Team const& team) {
  if constexpr (kRowWarps == 1) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;\n" ::"r"(1 + team.index), "n"(32 * kRowWarps) : "memory");
  }
}

// Brings a team's slices into its stages, ahead of their use. All its warps keep the same state.
template <class Cache, int kRowWarps, class Schedule>
class Loader {
  using S = Shape<Cache, kRowWarps>;

 public:
  // `schedule` was read; of `blocks` that share a segment's pages this is number `rank`.
  __device__ Loader(PagedDecodeParams const& p, Schedule const& schedule, int rank, int blocks,
                    uint32_t stages, int32_t (&slices)[WARPS][MAX_STAGES])
      : p_(p),
        ahead_(schedule),
        team_(kRowWarps),
        stages_(stages + team_.index * kRowWarps * WARP_BYTES),
        slices_(slices[threadIdx.x / 32]),
        part_(team_.index / S::SLICES * blocks + rank),
        parts_mask_(S::PAGES * blocks - 1) {
    base_ = ahead_.first();
    read_ids();
    open_chunk();
  }

  // Starts the team's next slice on its way into a stage and notes what it is; an empty one ends a
  // segment of which the team has none.
  __device__ void load(int stage) {
    if (is_spent_) {
      do {
        if (ahead_.done()) {
          slices_[stage] = 0;
          return;
        }
        open_chunk();
      } while (is_spent_);
    } else if (!is_resolved_) {
      read_pages();  // the ids have had a slice's time to arrive
    }
    int visible = 0;
    if (unread_ != 0) {
      int const at = __ffs(unread_) - 1;
      unread_ &= unread_ - 1;
      visible = min(kBlockSize, __shfl_sync(~0u, visible_, at));
      copy(stage, __shfl_sync(~0u, pages_, at), visible);
    }
    is_spent_ = unread_ == 0;
    slices_[stage] = visible | (is_spent_ && ends_segment_ ? LAST_SLICE : 0);
  }

 private:
  __device__ bool is_selected() const { return p_.block_ids != nullptr; }
  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ int slice() const { return team_.index % S::SLICES; }

  // A chunk is up to 32 pages of a segment, one a lane; of a selection it is all. Its ids and pages
  // are read while the one before it is loaded.
  __device__ void read_ids() {
    is_resolved_ = false;
    if (ahead_.done()) return;
    if (is_selected()) {
      int64_t const row = int64_t{ahead_.head()} * p_.tokens.num_tokens + ahead_.first_token();
      next_ids_ = lane() < p_.top_k ? p_.block_ids[row * p_.top_k + lane()] : -1;
    } else {
      next_ids_ = base_ + lane();
      read_pages();
    }
  }
  __device__ void read_pages() {
    is_resolved_ = true;
    if (ahead_.done()) return;
    ahead_.resolve();
    bool const visible = next_ids_ >= 0 && next_ids_ <= (ahead_.length() - 1) / kBlockSize &&
                         ahead_.length() > 0;
    next_pages_ = visible ? page_of(p_.tokens, ahead_.request(), next_ids_) : -1;
  }

  __device__ void open_chunk() {
    if (!is_resolved_) read_pages();
    pages_ = next_pages_;
    head_ = ahead_.head();
    visible_ = ahead_.length() - next_ids_ * kBlockSize - slice() * S::KEYS;
    bool const exists = pages_ >= 0;
    int const index = is_selected() ? __popc(__ballot_sync(~0u, exists) & ((1u << lane()) - 1))
                                    : base_ + lane();
    unread_ = __ballot_sync(~0u, exists && visible_ > 0 && index >= ahead_.first() &&
                                     index < ahead_.end() && (index & parts_mask_) == part_);
    ends_segment_ = is_selected() || base_ + 32 >= ahead_.end();
    is_spent_ = unread_ == 0 && !ends_segment_;
    if (ends_segment_) {
      ahead_.next();
      base_ = ahead_.first();
      if (!ahead_.done()) ahead_.read();
    } else {
      base_ += 32;
    }
    read_ids();
  }

  // Zeros behind the visible keys: what lies there may be NaN.
  __device__ void copy(int stage, int32_t page, int visible) {
    constexpr int CHUNKS = Products<Cache>::CHUNKS;
    constexpr int STEP = S::TEAM_THREADS / CHUNKS;  // keys at once
    int const row = team_.thread / CHUNKS, chunk = team_.thread % CHUNKS;
    DecodeView const& view = p_.view;
    int64_t const id = int64_t{page} * view.ids_per_page + head_ * view.ids_per_head;
    int64_t const first = id * view.page_stride + head_ * view.head_stride +
                          (slice() * S::KEYS + row) * view.token_stride +
                          chunk * static_cast<int>(16 / sizeof(Cache));
    auto const* const from_k = static_cast<Cache const*>(view.keys) + first;
    auto const* const from_v = static_cast<Cache const*>(view.values) + first;
    uint32_t const to = stages_ + stage * STAGE_BYTES;
#pragma unroll
    for (int i = 0; i < S::KEYS / STEP; ++i) {
      copy_async(to + swizzled<CHUNKS>(row + i * STEP, chunk), from_k + i * STEP * view.token_stride,
                 row + i * STEP < visible);
    }
#pragma unroll
    for (int i = 0; i < S::KEYS / STEP; ++i) {
      copy_async(to + S::SLICE_BYTES + swizzled<CHUNKS>(row + i * STEP, chunk),
                 from_v + i * STEP * view.token_stride, row + i * STEP < visible);
    }
  }

  PagedDecodeParams const& p_;
  Schedule ahead_;  // at the segment of the next chunk
  Team team_;
  uint32_t stages_;
  int32_t* slices_;
  int part_, parts_mask_;  // the team takes every page `part_` of them
  int32_t base_;           // of the next chunk
  int32_t next_ids_ = -1, next_pages_ = -1;
  bool is_resolved_ = false;
  int32_t pages_ = -1, visible_ = 0, head_ = 0;
  unsigned unread_ = 0;
  bool ends_segment_ = false, is_spent_ = true;
};

}  // namespace m3::kernels::paged_decode
