#pragma once

#include "kernels/arriving_ids.cuh"
#include "kernels/bulk_copy.cuh"
#include "kernels/paged_decode_math.cuh"
#include "kernels/paged_decode_schedule.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/tensor_map.h"

// The decode kernel's shared memory and how queries, keys and values get there.
namespace m3::kernels::paged_decode {

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int MAX_STAGES = 3;
constexpr int WARP_BYTES = 8192;  // of a stage: keys and values, later the warp's result
constexpr int STAGE_BYTES = WARPS * WARP_BYTES;
static_assert(WARP_BYTES == 16 * kHeadSize * sizeof(float));

// kRowWarps tiles of 16 query rows (row = token of the item * group + query head of the KV head),
// one a warp of a team. A team takes slices of the pages, on its own through its own ring of
// stages.
template <class Cache, int kRowWarps>
struct Shape {
  static constexpr int ROWS = 16 * kRowWarps;
  static constexpr int TEAMS = WARPS / kRowWarps;
  static constexpr int TEAM_THREADS = 32 * kRowWarps;
  static constexpr int KEYS = Products<Cache>::KEYS * kRowWarps;  // of a slice
  static constexpr int SLICES = kBlockSize / KEYS;                // of a page
  static constexpr int SLICE_BYTES = KEYS * Products<Cache>::CHUNKS * 16;
  static_assert(2 * SLICE_BYTES == kRowWarps * WARP_BYTES);
};

// The view's keys and values for the copy engine, as tensors of three dimensions: channels of all
// heads, keys of a page, ids.
struct BulkMaps {
  CUtensorMap keys, values;
};

// For slices of `keys`.
inline cudaError_t encode_view(BulkMaps& maps, DecodeView const& view, int keys) {
  cuuint64_t const bytes = view.type == Type::kFloat8E4m3 ? 1 : 2;
  // Any id: the page table says which exist.
  cuuint64_t const dims[] = {static_cast<cuuint64_t>(view.token_stride), kBlockSize, INT32_MAX};
  cuuint64_t const strides[] = {view.token_stride * bytes, view.page_stride * bytes};
  cuuint32_t const box[] = {static_cast<cuuint32_t>(128 / bytes), static_cast<cuuint32_t>(keys), 1};
  auto const type = bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  // Fetching more than a row of the box would fetch another head's keys.
  auto const promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  cudaError_t const status =
      encode_tensor_map(maps.keys, view.keys, type, 3, dims, strides, box, promotion);
  if (status != cudaSuccess) return status;
  return encode_tensor_map(maps.values, view.values, type, 3, dims, strides, box, promotion);
}

// The dynamic shared memory holds the stages, then this.
template <int kRowWarps>
struct alignas(128) DecodeShared {
  static constexpr int TEAMS = WARPS / kRowWarps;
  uint8_t queries[16 * kRowWarps * kHeadSize * 2];
  float maxima[TEAMS][16 * kRowWarps];
  float sums[TEAMS][16 * kRowWarps];
  int2 pages[WARPS][32];  // of a chunk: page, and keys from its first on that the item sees
  uint64_t arrived[TEAMS][MAX_STAGES];
  int32_t last_stage[TEAMS];
  // Keys from the slice's first on that the item's last token sees; LAST_SLICE when it ends a
  // segment.
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
template <class Cache, int kRowWarps, bool kSelected, bool kBulk, class Schedule>
class Loader {
  using S = Shape<Cache, kRowWarps>;

 public:
  // `schedule` was read; of `blocks` that share a segment's pages this is number `rank`.
  __device__ Loader(PagedDecodeParams const& p, BulkMaps const& maps, Schedule const& schedule,
                    int rank, int blocks, uint32_t stages, DecodeShared<kRowWarps>& shared)
      : p_(p),
        maps_(maps),
        ahead_(schedule),
        team_(kRowWarps),
        stages_(stages + team_.index * kRowWarps * WARP_BYTES),
        arrived_(shared_address(shared.arrived[team_.index])),
        list_(shared.pages[threadIdx.x / 32]),
        slices_(shared.slices[threadIdx.x / 32]),
        part_(team_.index * blocks + rank),
        parts_(S::TEAMS * blocks) {
    base_ = ahead_.first();
    read_ids<true>();
  }

  // Starts the team's next slice on its way into a stage and notes what it is; an empty one ends a
  // segment of which the team has none (more).
  __device__ void load(int stage) {
    // The ids have had some slices' time to arrive, unless they are needed now.
    if (kSelected && !is_resolved_ && (is_spent_ || ++age_ > MAX_STAGES)) read_pages();
    while (is_spent_) {
      if (ahead_.done()) {
        slices_[stage] = 0;
        return;
      }
      open_chunk();
    }
    int visible = 0;
    if (next_ < end_) {
      int2 const page = list_[next_ / S::SLICES];
      int const slice = next_ % S::SLICES;
      // The keys that a page lacks are those of its last slices.
      visible = min(2 * kBlockSize, page.y - slice * S::KEYS);
      next_ += parts_;
      if (visible > 0) {
        copy(stage, page.x, slice * S::KEYS, visible);
      } else {
        visible = 0;
      }
    }
    is_spent_ = next_ >= end_;
    slices_[stage] = visible | (is_spent_ && ends_segment_ ? LAST_SLICE : 0);
  }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }

  // A chunk is up to 32 pages of a segment, one a lane; of a selection it is all. Its ids and pages
  // are read while the one before it is loaded.
  // Ids of the first segment may still be written.
  template <bool kFirst = false>
  __device__ void read_ids() {
    is_resolved_ = false;
    if (ahead_.done()) return;
    if constexpr (kSelected) {
      int64_t const row = int64_t{ahead_.head()} * p_.tokens.num_tokens + ahead_.first_token();
      int32_t const* const id = p_.block_ids + row * p_.top_k + lane();
      if (!kFirst) wait_for_previous_kernel();
      next_ids_ = lane() >= p_.top_k ? -1 : kFirst ? wait_for_id(id) : *id;
      __syncwarp();
      age_ = 0;
    } else {
      next_ids_ = base_ + lane();
      read_pages();
    }
  }
  __device__ void read_pages() {
    is_resolved_ = true;
    if (ahead_.done()) return;
    ahead_.resolve();
    bool const visible = next_ids_ >= 0 &&
                         next_ids_ < (ahead_.length() + kBlockSize - 1) / kBlockSize &&
                         (kSelected || next_ids_ < ahead_.end());
    next_pages_ = visible ? page_of(p_.tokens, ahead_.request(), next_ids_) : -1;
  }

  __device__ void open_chunk() {
    bool const exists = next_pages_ >= 0;
    unsigned const existing = __ballot_sync(~0u, exists);
    __syncwarp();  // the list has been read
    if (exists) {
      list_[__popc(existing & ((1u << lane()) - 1))] =
          make_int2(next_pages_, ahead_.length() - next_ids_ * kBlockSize);
    }
    __syncwarp();
    head_ = ahead_.head();
    int const count = __popc(existing);
    next_ = part_;
    end_ = count * S::SLICES;
    if constexpr (kSelected) {
      next_ += ahead_.first() * S::SLICES;
      end_ = min(count, ahead_.end()) * S::SLICES;
    }
    ends_segment_ = kSelected || base_ + 32 >= ahead_.end();
    is_spent_ = next_ >= end_ && !ends_segment_;
    if (ends_segment_) {
      ahead_.next();
      base_ = ahead_.first();
      if (!ahead_.done()) ahead_.read();
    } else {
      base_ += 32;
    }
    read_ids();
  }

  __device__ void copy(int stage, int32_t page, int key, int visible) {
    DecodeView const& view = p_.view;
    uint32_t const to = stages_ + stage * STAGE_BYTES;
    if constexpr (kBulk) {
      if (team_.thread != 0) return;
      uint32_t const arrived = arrived_ + stage * 8;
      expect_bulk(arrived, 2 * S::SLICE_BYTES);
      int const id = page * view.ids_per_page + head_ * view.ids_per_head;
      int const channel = head_ * static_cast<int>(view.head_stride);
#pragma unroll
      for (int c = 0; c < Products<Cache>::CHUNKS / 8; ++c) {
        copy_bulk(to + c * S::KEYS * 128, &maps_.keys, arrived, channel + 64 * c, key, id);
      }
#pragma unroll
      for (int c = 0; c < Products<Cache>::CHUNKS / 8; ++c) {
        copy_bulk(to + S::SLICE_BYTES + c * S::KEYS * 128, &maps_.values, arrived, channel + 64 * c,
                  key, id);
      }
    } else {
      constexpr int CHUNKS = Products<Cache>::CHUNKS;
      constexpr int STEP = S::TEAM_THREADS / CHUNKS;  // keys at once
      int const row = team_.thread / CHUNKS, chunk = team_.thread % CHUNKS;
      int64_t const id = int64_t{page} * view.ids_per_page + head_ * view.ids_per_head;
      int64_t const first = id * view.page_stride + head_ * view.head_stride +
                            (key + row) * view.token_stride +
                            chunk * static_cast<int>(16 / sizeof(Cache));
      auto const* const from_k = static_cast<Cache const*>(view.keys) + first;
      auto const* const from_v = static_cast<Cache const*>(view.values) + first;
      // Zeros behind the visible keys: what lies there may be NaN.
#pragma unroll
      for (int i = 0; i < S::KEYS / STEP; ++i) {
        copy_async(to + key_chunk(S::KEYS, row + i * STEP, chunk),
                   from_k + i * STEP * view.token_stride, row + i * STEP < visible);
      }
#pragma unroll
      for (int i = 0; i < S::KEYS / STEP; ++i) {
        copy_async(to + S::SLICE_BYTES + key_chunk(S::KEYS, row + i * STEP, chunk),
                   from_v + i * STEP * view.token_stride, row + i * STEP < visible);
      }
    }
  }

  PagedDecodeParams const& p_;
  BulkMaps const& maps_;
  Schedule ahead_;  // at the segment of the next chunk
  Team team_;
  uint32_t stages_, arrived_;
  int2* list_;
  int32_t* slices_;
  int part_, parts_;  // the team takes every slice `part_` of them
  int32_t base_;      // of the next chunk
  int32_t next_ids_ = -1, next_pages_ = -1;
  bool is_resolved_ = false;
  int age_ = 0;  // slices since the ids were read
  int32_t head_ = 0, next_ = 0, end_ = 0;
  bool ends_segment_ = false, is_spent_ = true;
};

}  // namespace m3::kernels::paged_decode
