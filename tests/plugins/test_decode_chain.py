"""Selection and attention behind it, without TensorRT: ids that are taken as they are written."""

from __future__ import annotations

import plugin_harness as harness
import pytest
import torch
from m3trt.bench import kernel_library as attention
from m3trt.bench import select_library as selection
from m3trt.bench.kernel_library import BLOCK, HEAD, Batch
from selection_inputs import random_cache, random_queries

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.full,
    pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-"),
]
CACHES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
TURNS = 10


@pytest.mark.parametrize("cache_type", CACHES)
@pytest.mark.parametrize(
    ("lengths", "q_len", "heads"),
    [
        ([8192], 1, 4),
        ([32_768], 1, 4),
        ([131_072], 1, 4),
        ([131_072], 1, 1),
        ([600_000], 1, 4),
        ([1_048_576], 1, 4),
        ([131_072] * 8, 1, 4),
        ([131_072] * 8, 1, 1),
        ([70_000, 3, 300_000, 2049], 1, 4),
        ([60_000, 20_000], 4, 4),
        ([3000] * 90, 1, 4),
    ],
    ids=["8k", "32k", "128k", "128k-tp4", "600k", "1m", "8", "8-tp4", "ragged", "mtp", "many"],
)
def test_attention_of_each_steps_own_selection(
    lengths: list[int], q_len: int, heads: int, cache_type: str
) -> None:
    """Chains on the same buffers, in a graph: no step takes ids, scores or results of another."""
    dtype = CACHES[cache_type]
    batch = Batch.make(lengths, q_len=q_len)
    scale = torch.tensor([0.75], device="cuda") if cache_type == "e4m3" else None
    index_q, index_cache = random_queries(batch, heads), random_cache(batch, dtype)
    q = random_queries(batch, 16 * heads)
    kv_cache = torch.randn(batch.num_pages, 2, BLOCK, heads, HEAD, device="cuda").to(dtype)
    queries = [random_queries(batch, heads) for _ in range(TURNS)]
    select = selection.select(selection.load(), "decode_select", batch, index_q, index_cache, scale)
    attend = attention.decode(attention.load(), batch, q, kv_cache, select(), scale)
    expected = []
    for query in queries:
        index_q.copy_(query)
        select()
        torch.cuda.synchronize()
        expected.append(attend().clone())
        torch.cuda.synchronize()
    assert not torch.equal(expected[0], expected[1])
    results = [torch.empty_like(right) for right in expected]

    def chains() -> None:
        for query, result in zip(queries, results, strict=True):
            index_q.copy_(query)
            select()
            result.copy_(attend())

    replay = chains
    if not harness.ONE_RUN:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chains()
        replay = graph.replay
    for _ in range(3):
        for result in results:
            result.fill_(torch.nan)
        replay()
        torch.cuda.synchronize()
        for result, right in zip(results, expected, strict=True):
            assert torch.equal(result, right)
