"""The decode selection kernel itself, without TensorRT, against fp64 scores.

What an engine cannot show: caches past 2^31 elements, contexts of a million tokens, the workspace.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator

import plugin_harness as harness
import pytest
import torch
from m3trt.bench import select_library as kernels
from m3trt.bench.kernel_library import BLOCK, HEAD, Batch
from m3trt.bench.select_library import Rule
from selection_inputs import random_cache, random_queries
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.full,
    pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-"),
]
M3 = Rule()
CACHES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
RAGGED = [1, 127, 128, 129, 2047, 2048, 2049, 2176, 2177, 9000, 32768, 33000, 40_001]


@functools.cache
def library() -> ctypes.CDLL:
    return kernels.load()


def rows_of(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """(request, token, position) of every real decode token."""
    offsets, lengths = batch.cu_query_lens.tolist(), batch.sequence_length.tolist()
    for request in range(len(lengths) - batch.num_decode, len(lengths)):
        for token in range(offsets[request], offsets[request + 1]):
            yield request, token, lengths[request] - (offsets[request + 1] - token)


def block_scores(
    batch: Batch, q: Tensor, cache: Tensor, request: int, token: int, position: int
) -> Tensor:
    """fp64 [Hi, visible blocks]; NaN products and missing pages count as minus infinity."""
    pages = batch.table[request, : min(position // BLOCK + 1, batch.table.shape[1])].long()
    keys = cache[pages.clamp(min=0)].float().double()
    products = (keys.view(-1, HEAD) @ q[token].float().double().T).view(-1, BLOCK, q.shape[1])
    seen = torch.arange(len(pages) * BLOCK, device="cuda").view(-1, BLOCK) <= position
    seen &= (pages >= 0)[:, None]
    products = products.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return products.masked_fill(~seen[..., None], -torch.inf).amax(dim=1).T


def check(batch: Batch, q: Tensor, cache: Tensor, ids: Tensor, rule: Rule = M3) -> None:
    """Every row is a right selection, and padding is -1."""
    assert (ids[:, int(batch.cu_query_lens[-1]) :] == -1).all(), "padding rows are not -1"
    undecided = total = 0
    for request, token, position in rows_of(batch):
        if position < 0:
            assert (ids[:, token] == -1).all()
            continue
        scores = block_scores(batch, q, cache, request, token, position)
        visible = scores.shape[1]
        own, count = position // BLOCK, min(rule.top_k, visible)
        where = f"request {request}, token {token}, position {position}: {ids[:, token].tolist()}"
        chosen = ids[:, token, :count].long()
        assert (ids[:, token, count:] == -1).all(), where
        assert (chosen[:, 1:] > chosen[:, :-1]).all(), where
        assert ((chosen >= 0) & (chosen < visible)).all(), where
        block = torch.arange(visible, device="cuda")
        forced = (block < rule.init) | (block > own - rule.local)
        taken = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
        assert taken[:, forced].all(), where
        free = count - int(forced.sum())
        if free <= 0 or count == visible:
            continue
        open_scores, open_taken = scores[:, ~forced], taken[:, ~forced]
        cut = open_scores.topk(free, dim=1).values[:, -1:]
        # fp32 sums of 128 products of this size differ by no more than this.
        epsilon = 5e-6 * scores[scores.isfinite()].abs().max()
        assert not (open_taken & (open_scores < cut - epsilon)).any(), where
        assert not (~open_taken & (open_scores > cut + epsilon)).any(), where
        undecided += int((((open_scores - cut).abs() <= epsilon).sum(dim=1) > 1).sum())
        total += len(scores)
    allowed = max(2, total // 20)
    assert undecided <= allowed, f"{undecided} of {total} rows are decided by rounding"


def run(
    batch: Batch, q: Tensor, cache: Tensor, rule: Rule = M3, scale: Tensor | None = None
) -> Tensor:
    """Three times, over poisoned results and workspaces of other contents: the same bits."""
    results = []
    for poison in (0xFF, 0x00, 0x7F):
        workspace = torch.full((48 << 20,), poison, dtype=torch.uint8, device="cuda")
        call = kernels.select(library(), "decode_select", batch, q, cache, scale, rule, workspace)
        torch.cuda.synchronize()
        results.append(call().clone())
    torch.cuda.synchronize()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    return results[0]


@pytest.mark.parametrize("cache_type", CACHES)
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("q_len", [1, 2, 3, 4, 8])
def test_selects_the_best_blocks(q_len: int, heads: int, cache_type: str) -> None:
    lengths = [max(length, q_len) for length in RAGGED]
    batch = Batch.make(lengths, q_len=q_len, padded_rows=3)
    q, cache = random_queries(batch, heads), random_cache(batch, CACHES[cache_type])
    scale = torch.tensor([0.37], device="cuda") if cache_type == "e4m3" else None
    check(batch, q, cache, run(batch, q, cache, scale=scale))


@pytest.mark.parametrize(
    "rule",
    [Rule(8, 2, 3), Rule(32), Rule(1), Rule(3, 1, 2), Rule(32, 4, 8), Rule(16, 0, 16)],
    ids=str,
)
def test_takes_forced_blocks(rule: Rule) -> None:
    batch = Batch.make(RAGGED[3:], q_len=3, padded_rows=1)
    q, cache = random_queries(batch, 4), random_cache(batch)
    check(batch, q, cache, run(batch, q, cache, rule), rule)


@pytest.mark.parametrize(("q_len", "longest"), [(1, 2000), (1, 9000), (8, 9000)])
def test_rows_at_the_borders_of_the_ways_to_select(q_len: int, longest: int) -> None:
    """Few blocks, short and long rows, rows of several parts; 256, 512 and 128 threads a row."""
    blocks = [17, 64, 65, 66, 67, 481, 482, 497, 993, 994, 1009, 1010, 1985, 1986, 4097, 4098, 8200]
    lengths = [(count - 1) * BLOCK + 77 for count in blocks if count <= longest]
    batch = Batch.make(lengths, q_len=q_len)
    q, cache = random_queries(batch, 4), random_cache(batch)
    check(batch, q, cache, run(batch, q, cache))
    check(batch, q, cache, run(batch, q, cache, Rule(16, 3, 2)), Rule(16, 3, 2))


@pytest.mark.parametrize("blocks", [1, 15, 16, 17, 18])
def test_every_tail(blocks: int) -> None:
    batch = Batch.make([(blocks - 1) * BLOCK + tail for tail in range(1, BLOCK + 1)])
    q, cache = random_queries(batch, 4), random_cache(batch)
    check(batch, q, cache, run(batch, q, cache))


def test_a_table_narrower_than_the_sequence_and_missing_pages() -> None:
    batch = Batch.make([9000, 5000, 20_000, 4000], q_len=2)
    batch.table = batch.table[:, :50].contiguous()
    batch.table[2, 3:9] = -1
    batch.table[3, :24] = -1  # fewer pages than a selection takes
    q, cache = random_queries(batch, 4), random_cache(batch)
    check(batch, q, cache, run(batch, q, cache))


@pytest.mark.parametrize("cache_type", CACHES)
@pytest.mark.parametrize("q_len", [1, 4])
def test_pages_whose_slices_are_drawn(q_len: int, cache_type: str) -> None:
    """Each block of threads has 29 pages on 132 processors, of several requests, some missing."""
    batch = Batch.make([9000 + 1000 * i for i in range(24)], q_len=q_len, padded_rows=2)
    batch.table[torch.rand(batch.table.shape, device="cuda") < 0.05] = -1
    q, cache = random_queries(batch, 4), random_cache(batch, CACHES[cache_type])
    scale = torch.tensor([0.37], device="cuda") if cache_type == "e4m3" else None
    check(batch, q, cache, run(batch, q, cache, scale=scale))


def test_a_sequence_shorter_than_its_tokens() -> None:
    batch = Batch.make([3000, 3000], q_len=4)
    batch.sequence_length[0] = 2
    q, cache = random_queries(batch, 4), random_cache(batch)
    check(batch, q, cache, run(batch, q, cache))


@pytest.mark.parametrize("tokens", [131_072, 524_288, 1_048_576], ids=str)
def test_finds_needles_at_every_depth(tokens: int) -> None:
    """Each of 32 rows looks for 15 blocks that no other row looks for, until all had their turn."""
    batch = Batch.make([tokens], q_len=8)
    q, clean = random_queries(batch, 4), random_cache(batch)
    rows = q.transpose(0, 1).reshape(32, HEAD)
    blocks = torch.randperm(tokens // BLOCK - 1, device="cuda")
    for turn in blocks.split(32 * 15):
        needles = torch.cat([turn, blocks])[: 32 * 15].view(32, 15)
        cache = clean.clone()
        pages = batch.table[0, needles.flatten().long()].long()
        cache[pages, needles.flatten() * 31 % BLOCK] = rows.repeat_interleave(15, 0) * 4
        ids = kernels.select(library(), "decode_select", batch, q, cache)().view(32, 16)
        assert torch.equal(ids[:, :15].long(), needles.sort(dim=1).values)
        assert (ids[:, 15] == tokens // BLOCK - 1).all()


@pytest.mark.parametrize(("q_len", "heads"), [(2, 4), (8, 8)])
def test_a_million_tokens(q_len: int, heads: int) -> None:
    batch = Batch.make([1_048_576, 70_000, 1_000_001], q_len=q_len)
    q, cache = random_queries(batch, heads), random_cache(batch)
    check(batch, q, cache, run(batch, q, cache))


def test_equal_scores_go_to_the_lower_block() -> None:
    batch = Batch.make([6000, 2049, 600_000], q_len=2)
    q, cache = random_queries(batch, 4), random_cache(batch)
    cache[~cache.isnan()] = 1
    q[1] = -0.0  # products of both zeros tie as well
    ids = run(batch, q, cache)
    for _, token, position in rows_of(batch):
        assert ids[:, token].tolist() == [[*range(15), position // BLOCK]] * 4


def test_many_blocks_above_the_first_bound() -> None:
    """Good blocks lie where a fixed assignment of blocks to threads puts them into few groups."""
    batch = Batch.make([1_048_576])
    q, cache = random_queries(batch, 1), random_cache(batch)
    block = torch.arange(8192, device="cuda")
    good = batch.table[0, block[(block // 4 % 64 < 15) & (block < 8191)].long()].long()
    cache[good, 5] = (q[0, 0] * (1 + torch.rand(len(good), 1, device="cuda"))).bfloat16()
    check(batch, q, cache, run(batch, q, cache))


def test_steps_do_not_see_each_others_scores() -> None:
    """Back to back in one workspace: what another step left there is never taken for a score."""
    workspace = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    calls = []
    steps = ([131_072], [9000, 40_000, 2100], [600_000], [131_072], [3000, 70_000], [700_000])
    for turn, lengths in enumerate(steps):
        batch = Batch.make(lengths, q_len=turn % 2 + 1, seed=turn)
        q, cache = random_queries(batch, 4), random_cache(batch)
        arguments = (library(), "decode_select", batch, q, cache)
        calls.append(
            (kernels.select(*arguments, workspace=workspace), kernels.select(*arguments)())
        )
    torch.cuda.synchronize()
    results = [[call().clone() for call, _ in calls] for _ in range(25)]
    torch.cuda.synchronize()
    for ids in results:
        assert all(torch.equal(x, expected) for x, (_, expected) in zip(ids, calls, strict=True))


def test_e4m3_cache_and_queries_of_any_size() -> None:
    """Rows of zeros, huge and tiny ones, and rows that one channel rules."""
    batch = Batch.make([20_000, 5000], q_len=8)
    q, cache = random_queries(batch, 4), random_cache(batch, torch.float8_e4m3fn)
    q *= torch.logspace(-30, 30, len(q), device="cuda", dtype=torch.float64)[:, None, None].float()
    q[3, 0], q[9, 2] = 0, -0.0
    q[1:12:2, :, 77] *= 1 << 8
    check(batch, q, cache, run(batch, q, cache, scale=torch.tensor([0.01], device="cuda")))


def test_nan_scores_lose() -> None:
    batch = Batch.make([5000, 9000], q_len=2)
    q, cache = random_queries(batch, 4), random_cache(batch)
    for row in range(2):
        own = batch.table[row].long()
        cache[own[4]] = torch.nan  # a whole block
        cache[own[9], ::2] = torch.nan  # its other keys still count
        cache[own[11], :, 5] = torch.inf  # +inf or -inf by the query's sign
    q[1] = torch.nan  # nothing compares: the lowest blocks and the own one
    ids = run(batch, q, cache)
    assert ids[:, 1].tolist() == [[*range(15), 39]] * 4
    q[1] = q[0]
    ids[:, 1] = run(batch, q, cache)[:, 1]
    check(batch, q, cache, ids)
    assert not (ids == 4).any()


@pytest.mark.parametrize("cache_type", CACHES)
def test_does_not_depend_on_the_batch(cache_type: str) -> None:
    """A request selects the same alone as anywhere in a batch, although it is split differently."""
    lengths = [40_000, 3000, 131_072, 8192, 65_537, 200_000] * 5
    batch = Batch.make(lengths, q_len=2)
    q, cache = random_queries(batch, 4), random_cache(batch, CACHES[cache_type])
    scale = torch.tensor([2.5], device="cuda") if cache_type == "e4m3" else None
    together = run(batch, q, cache, scale=scale)
    for row in (0, 2, 7, 17, 29):
        alone = Batch(
            batch.cu_query_lens[:2],
            batch.sequence_length[row : row + 1],
            batch.table[row : row + 1, : -(-lengths[row] // BLOCK)].contiguous(),
            *(2, 1, 2, batch.num_pages),
        )
        ids = run(alone, q[2 * row : 2 * row + 2].contiguous(), cache, scale=scale)
        assert torch.equal(ids, together[:, 2 * row : 2 * row + 2])


def test_caches_past_two_gigabytes() -> None:
    """2.3e9 elements; page ids up to the last."""
    pages = 140_000
    batch = Batch.make([300_000, 2500])
    top = pages - batch.num_pages
    q, small = random_queries(batch, 4), random_cache(batch)
    cache = torch.full((pages, BLOCK, HEAD), torch.nan, dtype=torch.bfloat16, device="cuda")
    cache[top:] = small
    expected = run(batch, q, small)
    batch.table = torch.where(batch.table >= 0, batch.table + top, batch.table)
    assert torch.equal(run(batch, q, cache), expected)


def test_works_in_rounds_when_the_scores_exceed_the_budget() -> None:
    """40 requests with 64 rows each on a table of 8,192 pages: 84 MB of scores, 64 MB at once."""
    batch = Batch.make([3000 + 100 * i for i in range(40)], q_len=8, max_pages=8192, padded_rows=2)
    q, cache = random_queries(batch, 8), random_cache(batch)
    ids = kernels.select(library(), "decode_select", batch, q, cache)()
    check(batch, q, cache, ids)


def test_a_graph_serves_lengths_that_it_was_not_captured_for() -> None:
    """Captured for 200,000 tokens, replayed for others, empty rows included."""
    batch = Batch.make([200_000, 150_000, 100_000])
    q, cache = random_queries(batch, 4), random_cache(batch)
    call = kernels.select(library(), "decode_select", batch, q, cache)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = call()
    for lengths in ([100_001, 1, 2050], [200_000, 0, 0], [0, 0, 0], [5000, 150_000, 3]):
        real = sum(length > 0 for length in lengths)
        batch.sequence_length.copy_(torch.tensor(lengths))
        batch.cu_query_lens.copy_(torch.arange(4).clamp(max=real))
        ids.fill_(-7)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        check(batch, q, cache, ids)
