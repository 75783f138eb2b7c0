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

// A warp's ring of kStages slices and what fills it, ahead of the warp. The block of threads takes
// kBatch of its pages [begin, end) at a time.
template <class C, int kStages, int kBatch>
class SliceRing {
  static constexpr int OF_PAGE = Slices<C>::OF_PAGE;

 public:
  static constexpr int BYTES = kStages * SLICE_BYTES;

  // A page that is not like the one before.
  struct Mark {
    bool opens_request, missing;
    int32_t first_token, num_tokens;  // of its request
  };
  struct Shared {
    uint64_t barriers[kStages];
    Mark marks[kStages];
  };

  __device__ SliceRing(BlockSelectParams const& p, PageCursor const& cursor, int32_t begin,
                       int32_t end, int spared, uint8_t* slices, Shared& shared)
      : p_(p),
        cursor_(cursor),
        share_(share(begin, end, spared)),
        batch_(begin),
        end_(end),
        spared_(spared),
        slices_(shared_address(slices)),
        shared_(shared) {
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (uint64_t& barrier : shared_.barriers) init_bulk_barrier(shared_address(&barrier));
    }
    __syncwarp();
    if (share_.next < share_.last) jump();
  }

  // The next slice, none behind the last. Until the previous kernel has ended only keys of earlier
  // steps are loaded.
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

  // Whether there is a mark at the slice; only once.
  __device__ bool take_mark(int stage, Mark& mark) {
    if ((marked_ >> stage & 1) == 0) return false;
    marked_ &= ~(1u << stage);
    mark = shared_.marks[stage];
    return true;
  }

  __device__ void wait_for_previous() {
    if (!waited_) wait_for_previous_kernel();
    waited_ = true;
  }

  __device__ uint32_t slice(int stage) const { return slices_ + stage * SLICE_BYTES; }

 private:
  __device__ static Share share(int32_t batch, int32_t end, int spared) {
    return Share::of(batch, min(batch + kBatch, end), OF_PAGE, spared);
  }

  // Goes on to the next page of which the warp has a slice.
  template <bool kFirst>
  __device__ bool open_page(int stage) {
    if (!jumped_) {
      if (share_.next < share_.last) {
        jumped_ = step();
      } else if (kFirst || !next_batch()) {
        return false;
      }
    }
    int32_t const page = __shfl_sync(~0u, table_, cursor_.block() % 32);
    int const slice = share_.next % OF_PAGE;
    left_ = min(OF_PAGE - slice, share_.last - share_.next);
    share_.next += left_;
    from_ = static_cast<uint8_t const*>(p_.index_cache) +
            (int64_t{page} * OF_PAGE + slice) * SLICE_BYTES;
    if (jumped_ || missing_ != (page < 0)) {
      missing_ = page < 0;
      marked_ |= 1u << stage;
      if (threadIdx.x % 32 == 0) {
        shared_.marks[stage] = {jumped_, missing_, cursor_.request().first_token,
                                cursor_.request().num_tokens};
      }
    }
    jumped_ = false;
    if (!cursor_.is_old()) wait_for_previous();
    return true;
  }

  __device__ bool next_batch() {
    while (share_.next == share_.last) {
      if (batch_ + kBatch >= end_) return false;
      batch_ += kBatch;
      share_ = share(batch_, end_, spared_);
    }
    jump();
    return true;
  }

  // To the next page; true when it belongs to another request. The table is read up to 32 pages
  // ahead.
  __device__ bool step() {
    if (cursor_.advance()) {
      read_tables();
      return true;
    }
    if (cursor_.block() % 32 == 0) {
      table_ = next_table_;
      next_table_ = read_table(cursor_.block() / 32 + 1);
    }
    return false;
  }
  // To the first page of the share.
  __device__ void jump() {
    cursor_.seek(share_.next / OF_PAGE);
    read_tables();
    jumped_ = true;
  }
  __device__ void read_tables() {
    table_ = read_table(cursor_.block() / 32);
    next_table_ = read_table(cursor_.block() / 32 + 1);
  }
  __device__ int32_t read_table(int32_t window) const {
    return page_of(p_.tokens, cursor_.request().request,
                   window * 32 + static_cast<int32_t>(threadIdx.x % 32));
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
  PageCursor cursor_;
  Share share_;          // behind the open page
  bool jumped_ = false;  // to its first page, which opens a request
  int32_t batch_, end_, spared_;
  int32_t left_ = 0;  // slices of the open page
  uint8_t const* from_ = nullptr;
  uint32_t slices_;
  Shared& shared_;
  uint32_t marked_ = 0;  // a bit a stage
  bool missing_ = false, waited_ = false;
  int32_t table_ = -1, next_table_ = -1;  // 32 entries each, one a lane
};

}  // namespace m3::kernels::decode_select
