#pragma once

#include "kernels/bulk_copy.cuh"
#include "kernels/decode_select_pages.cuh"
#include "kernels/mma_sync.cuh"
#include "kernels/programmatic_launch.cuh"

// How index keys get into shared memory: in slices, through a ring of each warp's own. The copy
// engine brings them from sm_90 on, cp.async before.
namespace m3::kernels::decode_select {

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int CLEARING_WARP = WARPS - 1;
constexpr int CLEARING_SLICES = 2;  // which it scores less
constexpr int SLICE_BYTES = 4096;

template <class C>
struct Slices {
  static constexpr int ROW_BYTES = kHeadSize * sizeof(C);
  static constexpr int KEYS = SLICE_BYTES / ROW_BYTES;
  static constexpr int OF_PAGE = kBlockSize / KEYS;
};

// The slices [next, last) that a warp takes of those of the pages [first, end), numbered from the
// slices of page 0. The last warp is spared some.
struct Share {
  int32_t next, last;

  __device__ static Share of(int32_t first, int32_t end, int of_page, int spared) {
    int32_t const warp = threadIdx.x / 32, slices = (end - first) * of_page;
    auto const edge = [&](int32_t w) {
      return first * of_page + min(slices, (slices + spared) * w / WARPS);
    };
    return {edge(warp), edge(warp + 1)};
  }
};

// How many of a block's pages are a pool at the end of its last batch. Its slices are drawn one by
// one, so that the warps end together.
__device__ inline int32_t pool_of(int32_t pages, int32_t batch) {
  constexpr int LEAST = 16, PART = 8, MOST = 4;
  return pages < LEAST ? 0 : min(min(pages / PART, MOST), (pages - 1) % batch + 1);
}

// A warp's ring of kStages slices and what fills it, ahead of the warp: kBatch pages of the block
// of threads at a time.
template <class C, int kStages, int kBatch>
class SliceRing {
  static constexpr int OF_PAGE = Slices<C>::OF_PAGE;

 public:
  static constexpr int BYTES = kStages * SLICE_BYTES;

  struct Shared {
    uint64_t barriers[kStages];
    int32_t drawn[kStages];  // slices
  };

  // Before a barrier of the block.
  __device__ static void initialize(Shared& shared) {
    if (threadIdx.x % 32 != 0) return;
#pragma unroll
    for (uint64_t& barrier : shared.barriers) init_bulk_barrier(shared_address(&barrier));
  }

  // Of the block's pages [0, pool_begin), then what the warp draws of [pool_begin, end).
  __device__ SliceRing(BlockSelectParams const& p, PageTable<kBatch>& table, int32_t pool_begin,
                       int32_t end, int spared, uint8_t* slices, Shared& shared)
      : p_(p),
        table_(table),
        share_(share(0, pool_begin, spared)),
        pool_begin_(pool_begin),
        end_(end),
        spared_(spared),
        slices_(shared_address(slices)),
        shared_(shared) {}

  // The next slice, none behind the last. The first ones, of one batch, may be loaded before the
  // previous kernel has ended: until then only keys of earlier steps are.
  template <bool kFirst = false>
  __device__ void load(int stage) {
    if (left_ > 0 || open_page<kFirst>(stage)) {
      start_copy(stage);
      --left_;
    }
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 900
    commit_copies();
#endif
  }

  // Waits for the slice.
  __device__ void wait(int stage, int turn) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    wait_bulk(shared_address(shared_.barriers + stage), turn & 1);
#else
    wait_copies<kStages - 1>();
    __syncwarp();
#endif
  }

  __device__ uint32_t slice(int stage) const { return slices_ + stage * SLICE_BYTES; }

  // Slices of the pool that are in the ring. They follow all others.
  __device__ bool has_drawn() const { return drawn_ > 0; }
  __device__ int32_t drawn(int stage) const { return shared_.drawn[stage]; }
  __device__ void finish_drawn() { --drawn_; }

 private:
  __device__ static Share share(int32_t batch, int32_t end, int spared) {
    return Share::of(batch, min(batch + kBatch, end), OF_PAGE, spared);
  }

  // Goes on to the next page of which the warp has a slice.
  template <bool kFirst>
  __device__ bool open_page(int stage) {
    int32_t at;
    if (share_.next < share_.last || (!kFirst && next_batch())) {
      at = share_.next;
      left_ = min(OF_PAGE - at % OF_PAGE, share_.last - at);
      share_.next += left_;
    } else {
      if (kFirst || !draw(at)) return false;
      left_ = 1;
      ++drawn_;
      if (threadIdx.x % 32 == 0) shared_.drawn[stage] = at;
    }
    Page const& page = table_[at / OF_PAGE];
    if (kFirst && !page.is_old()) wait_for_previous_kernel();
    missing_ = page.id < 0;
    from_ = static_cast<uint8_t const*>(p_.index_cache) +
            (int64_t{page.id} * OF_PAGE + at % OF_PAGE) * SLICE_BYTES;
    return true;
  }

  __device__ bool next_batch() {
    while (share_.next == share_.last) {
      if (batch_ + kBatch >= pool_begin_) return false;
      batch_ += kBatch;
      share_ = share(batch_, pool_begin_, spared_);
    }
    return true;
  }

  __device__ bool draw(int32_t& slice) {
    if (pool_begin_ >= end_) return false;
    int32_t ticket = 0;
    if (threadIdx.x % 32 == 0) ticket = atomicAdd(&table_.drawn, 1);
    slice = pool_begin_ * OF_PAGE + __shfl_sync(~0u, ticket, 0);
    if (slice < end_ * OF_PAGE) return true;
    end_ = pool_begin_;
    return false;
  }

  __device__ void start_copy(int stage) {
    int const lane = threadIdx.x % 32;
    bool const there = !missing_;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (lane == 0) {
      uint32_t const barrier = shared_address(shared_.barriers + stage);
      expect_bulk(barrier, there ? SLICE_BYTES : 0);
      if (there) copy_bulk(slice(stage), from_, barrier, SLICE_BYTES);
    }
#else
#pragma unroll
    for (int i = lane * 16; i < SLICE_BYTES; i += 512) {
      if (there) copy_async(slice(stage) + i, from_ + i, true);
    }
#endif
    from_ += SLICE_BYTES;
  }

  BlockSelectParams const& p_;
  PageTable<kBatch>& table_;
  Share share_;  // behind the open page
  int32_t batch_ = 0, pool_begin_, end_, spared_;
  int32_t left_ = 0;  // slices of the open page
  uint8_t const* from_ = nullptr;
  uint32_t slices_;
  Shared& shared_;
  int32_t drawn_ = 0;
  bool missing_ = false;
};

}  // namespace m3::kernels::decode_select
