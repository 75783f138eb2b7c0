#!/bin/sh
# Runs a small case of every kernel under compute-sanitizer on this machine's GPU: memory accesses,
# then races in shared memory, then the use of barriers. Only our kernels are checked, each launched
# once. Fails when any of the three does.
#
#   tests/sanitize.sh [PYTHON]
set -eu
set -f # patterns and brackets below are no file names
python=${1:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
[ -x "$sanitizer" ] || {
  echo "tests/sanitize.sh: compute-sanitizer is missing: it comes with the CUDA toolkit" >&2
  exit 1
}
# The cases that reach each kernel with the least work: one that does not exist is an error. wgmma's
# are skipped where it does not exist.
cases='
test_embedding.py::test_copies_rows[301-8-bf16]
test_add_rms_norm.py::test_norm_of_the_rounded_sum[odd-added-bf16]
test_add_rms_norm.py::test_norm_of_the_rounded_sum[odd-added-rows-f32]
test_gemm.py::test_is_exact_product[odd-gelu-bf16]
test_gemm.py::test_few_rows[3-2113-1536-plain]
test_gemm.py::test_few_rows[8-300-3072-plain]
test_cache_update.py::test_norms_rotates_and_writes[decode-sparse-bf16]
test_cache_update.py::test_norms_rotates_and_writes[mixed-sparse-e4m3-both]
test_cache_update.py::test_long_steps[1029-sparse-e4m3-kv]
test_cache_update.py::test_other_channels_turn[80-sparse-bf16]
test_block_select.py::test_selects_the_best_blocks[mixed-heads1-bf16]
test_block_select.py::test_selects_the_best_blocks[mixed-heads2-bf16-e4m3]
test_block_select.py::test_selects_the_best_blocks[decode-4-own-only]
test_paged_attention.py::test_is_exact_attention[mixed-gqa16-bf16]
test_paged_attention.py::test_is_exact_attention[decode-8-gqa4-f32-e4m3]
test_sparse_attention.py::test_attends_to_the_selection[mixed-gqa8-bf16-16]
test_sparse_attention.py::test_attends_to_the_selection[decode-8-gqa4-f32-e4m3-3]
test_moe.py::test_is_exact_mixture[decode-few-bf16]
test_moe.py::test_is_exact_mixture[decode-padded-bf16]
test_moe.py::test_is_exact_mixture[decode-padded-f32]
test_moe.py::test_is_exact_mixture[context-bf16]
test_moe.py::test_is_exact_mixture[two-slabs-bf16]
test_moe.py::test_is_exact_mixture[two-slabs-crowded]
test_varlen_attention.py::test_is_exact_attention[borders-small-bf16]
test_decode_select.py::test_a_sequence_shorter_than_its_tokens
test_decode_select.py::test_selects_the_best_blocks[2-4-e4m3]
test_decode_select.py::test_pages_whose_slices_are_drawn[1-bf16]
test_decode_select.py::test_many_blocks_above_the_first_bound
test_decode_chain.py::test_attention_of_each_steps_own_selection[32k-bf16]
test_decode_kernel.py::test_every_group[16]
test_decode_kernel.py::test_rows_without_keys[0]
test_decode_kernel.py::test_rows_without_keys[16]
test_decode_kernel.py::test_every_split_of_selections[9]
test_prefill_select.py::test_mixed_step_leaves_decode_rows_alone[sm90_prefill_select]
test_prefill_select.py::test_mixed_step_leaves_decode_rows_alone[smxx_prefill_select]
test_prefill_select.py::test_e4m3_cache[1]
test_sparse_prefill.py::test_attends_to_the_selection[wgmma-mixed-gqa16]
test_sparse_prefill.py::test_attends_to_the_selection[mma-mixed-gqa16]
test_sparse_prefill.py::test_attends_to_the_selection[wgmma-many-chunks-gqa8]
test_sparse_prefill.py::test_attends_to_the_selection[mma-whole-gqa16]
test_sparse_prefill.py::test_few_queries_of_a_block[wgmma-gqa8-runs]
test_sparse_prefill.py::test_selections[wgmma-gqa16-hot-holes]
test_sparse_prefill.py::test_dense_rows[wgmma-short-gqa8-holes]
test_sparse_prefill.py::test_dense_rows[mma-short-gqa8-holes]
test_sparse_prefill.py::test_query_by_query[mixed-gqa16-bf16]
test_sparse_prefill.py::test_query_by_query[chunk-ends-gqa8-e4m3]
test_sparse_prefill.py::test_e4m3_cache[gqa8]
'
# Compiled before, not under the sanitizer
"$python" -c 'from m3trt.bench import kernel_library, select_library as select
kernel_library.load(), select.load()'
folder=$root/tests/plugins
arguments=
for case in $cases; do arguments="$arguments $folder/$case"; done
# racecheck follows an mbarrier from the threads that arrive to those that wait, but not from others
# that the arriving thread has awaited: those of its warp (__syncwarp of a whole warp leaves no
# instruction) or of a named barrier. Their reads count as unordered, in the plainest ring of two
# buffers too. In these files a lane frees or fills buffers for its warp:
unfollowed='
kns=sm90_moe_decode_cu
kns=sm90_paged_prefill_cu
kns=sm90_sparse_prefill_cu
'
# Versions before 2026.4 (CUDA 13.5; on PyPI nvidia-cuda-sanitizer-api) report also what a thread
# frees for its warpgroup and, in decode kernels with teams of several warps, what lies on the two
# sides of a __syncthreads:
version=$("$sanitizer" --version | sed -n 's/^Version \([0-9]*\)[.]\([0-9]*\)[.].*/\1\2/p')
[ "$version" -ge 20264 ] || unfollowed="$unfollowed
kns=sm90_prefill_select_cu
regex=smxx_paged_decode_cu_.*decode_kernelI.*Li[24]E
"
races=racecheck
for filter in $unfollowed; do races="$races --kernel-name-exclude $filter"; done
# Every tensor is an allocation of its own, so that memcheck sees where it ends.
export M3_RUNS=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1
status=0
for tool in memcheck "$races" 'synccheck --num-cuda-barriers 64'; do
  echo "== $tool"
  # Launches in a graph are the same ones: one eager run each is enough here.
  "$sanitizer" --tool $tool --error-exitcode 9 --kernel-name kns=m3 --print-limit 20 \
    "$python" -m pytest $arguments -m gpu -q --timeout 300 -p no:cacheprovider --durations 5 ||
    status=$?
done
exit $status
