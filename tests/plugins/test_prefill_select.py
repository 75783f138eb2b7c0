"""The kernels that select blocks for context rows, without TensorRT, against fp64 scores."""

from __future__ import annotations

import ctypes
import dataclasses
import functools

import plugin_harness as harness
import pytest
import torch
from m3trt.bench import select_library as kernels
from m3trt.bench.kernel_library import BLOCK, HEAD, Batch, has_wgmma, size_of
from m3trt.bench.select_library import Rule
from selection_inputs import random_cache, random_queries
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.full,
    pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-"),
]
M3 = Rule()
POISON = 0x7B7B7B7B  # what select_library fills block ids with
LENGTHS = [1, 2, 7, 31, 63, 127, 128, 129, 130, 255, 256, 257, 511, 512, 513, 2047, 2048, 2049]
WGMMA, MMA = "sm90_prefill_select", "smxx_prefill_select"


@functools.cache
def library() -> ctypes.CDLL:
    return kernels.load()


@pytest.fixture(params=[WGMMA, MMA])
def kernel(request: pytest.FixtureRequest) -> str:
    if request.param == WGMMA and not has_wgmma():
        pytest.skip("wgmma exists on compute capability 9.0 only")
    return str(request.param)


def chunks(*new_on_prefix: tuple[int, int], max_pages: int = 0, padded_rows: int = 0) -> Batch:
    """Requests of (new tokens, tokens in front of them), then padding tokens."""
    lengths = [new + prefix for new, prefix in new_on_prefix]
    counts = [new for new, _ in new_on_prefix]
    return Batch.make(lengths, counts, max_pages=max_pages, padded_rows=padded_rows)


def run(
    kernel: str,
    batch: Batch,
    q: Tensor,
    cache: Tensor,
    scale: Tensor | None = None,
    rule: Rule = M3,
) -> Tensor:
    """Over poisoned workspaces of other contents: the same bits, and nothing behind the end."""
    step = kernels.c_step(batch, q, cache, rule)
    used = size_of(getattr(library(), f"m3_bench_{MMA}_workspace"), ctypes.byref(step))
    results = []
    for poison in (0xFF, 0x00, 0x7F):
        workspace = torch.full((used + 4096,), poison, dtype=torch.uint8, device="cuda")
        call = kernels.select(library(), kernel, batch, q, cache, scale, rule, workspace)
        results.append(call().clone())
        assert (workspace[used:] == poison).all(), "wrote behind the workspace"
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    return results[0]


def block_scores(batch: Batch, q: Tensor, cache: Tensor, request: int, tokens: Tensor) -> Tensor:
    """fp64 [Hi, tokens, blocks of the request], -inf where nothing is visible."""
    length = int(batch.sequence_length[request])
    end = int(batch.cu_query_lens[request + 1])
    pages = batch.table[request, : -(-length // BLOCK)].long()
    keys = cache[pages.clamp(min=0)].float().double().view(-1, HEAD)
    products = torch.einsum("thd,kd->htk", q[tokens].double(), keys)
    positions = length - end + tokens
    seen = torch.arange(len(keys), device="cuda") <= positions[:, None]
    seen &= (pages >= 0).repeat_interleave(BLOCK)
    products = products.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    products = products.masked_fill(~seen, -torch.inf)
    return products.view(*products.shape[:2], -1, BLOCK).amax(dim=-1)


def check_rows(scores: Tensor, own: Tensor, ids: Tensor, rule: Rule) -> tuple[int, int]:
    """ids [Hi, tokens, top_k] are right; how many of how many rows are decided by rounding."""
    block = torch.arange(scores.shape[2], device="cuda")
    visible = block <= own[:, None]
    forced = ((block < rule.init) | (block > own[:, None] - rule.local)) & visible
    count = visible.sum(dim=-1).clamp(max=rule.top_k)
    valid = torch.arange(rule.top_k, device="cuda") < count[:, None]
    assert (ids[:, ~valid] == -1).all()
    assert ((ids >= 0) & (ids <= own[:, None]))[:, valid].all()
    assert ((ids[..., 1:] > ids[..., :-1]) | ~valid[:, 1:]).all(), "not ascending"
    last = ids.gather(2, (count - 1).expand(len(ids), -1)[..., None].long())[..., 0]
    assert (last == own).all(), "the own block is not the last one"
    taken = torch.zeros(*scores.shape[:2], scores.shape[2] + 1, dtype=torch.bool, device="cuda")
    taken.scatter_(2, torch.where(valid, ids, scores.shape[2]).long(), True)
    taken = taken[..., :-1]
    assert (taken | ~forced).all(), "a forced block is missing"
    # fp32 sums of 128 products of this size differ by no more than this.
    epsilon = 5e-6 * scores[scores.isfinite()].abs().max()
    ranked = scores.masked_fill(forced, torch.inf).masked_fill(~visible, -torch.inf)
    index = (count - 1).expand(len(ids), -1)[..., None]
    cut = ranked.sort(dim=-1, descending=True).values.gather(2, index)
    assert not (taken & (ranked < cut - epsilon)).any(), "a worse block was taken"
    assert not (visible & ~taken & (ranked > cut + epsilon)).any(), "a better block was left"
    is_open = (ranked - cut).abs() <= epsilon
    undecided = (is_open & cut.isfinite()).sum(dim=-1) > 1
    return int(undecided.sum()), undecided.numel()


def check(
    batch: Batch,
    q: Tensor,
    cache: Tensor,
    ids: Tensor,
    rule: Rule = M3,
    samples: int = 512,
) -> None:
    """Context rows: up to `samples` random ones of each request, its first and its last ones."""
    offsets, lengths = batch.cu_query_lens.tolist(), batch.sequence_length.tolist()
    first_decode = batch.num_tokens - batch.num_decode * batch.q_len
    assert (ids[:, offsets[-1] : first_decode] == -1).all(), "padding rows are not -1"
    undecided = total = 0
    for request in range(len(lengths) - batch.num_decode):
        begin, end = offsets[request], offsets[request + 1]
        if begin == end:
            continue
        some = torch.randint(begin, end, (samples,), device="cuda")
        edges = torch.arange(begin, end, device="cuda")
        tokens = torch.cat([some, edges[:140], edges[-140:]]).unique()
        for part in tokens.split(max(1, (1 << 27) // (lengths[request] * q.shape[1]))):
            scores = block_scores(batch, q, cache, request, part)
            own = (lengths[request] - end + part) // BLOCK
            counts = check_rows(scores, own, ids[:, part], rule)
            undecided, total = undecided + counts[0], total + counts[1]
    assert undecided <= max(2, total // 50), f"{undecided} of {total} rows are decided by rounding"


CASES = {
    "lengths": [(n, 0) for n in LENGTHS],
    "continued": [(1, 2047), (1, 2048), (70, 4930), (300, 2000), (0, 500), (129, 40_000)],
    "8192": [(8192, 0)],
    "16384": [(16384, 0)],
    "three": [(345, 11264), (803, 11648), (1874, 10624)],
    "three-long": [(332, 116_864), (2980, 108_032), (12_928, 9984)],
}


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("case", CASES)
def test_selects_the_best_blocks(case: str, heads: int, kernel: str) -> None:
    batch = chunks(*CASES[case], padded_rows=5)
    q, cache = random_queries(batch, heads), random_cache(batch)
    check(batch, q, cache, run(kernel, batch, q, cache))


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(Rule(8, 2, 3), id="forced"),
        pytest.param(Rule(3, 1, 2), id="all-forced"),
        pytest.param(Rule(1), id="own-only"),
        pytest.param(Rule(32), id="top32"),
    ],
)
def test_other_rules(rule: Rule, kernel: str) -> None:
    batch = chunks((500, 9000), (1200, 1100), (5, 300_000))
    q, cache = random_queries(batch, 4), random_cache(batch)
    check(batch, q, cache, run(kernel, batch, q, cache, rule=rule), rule)


@pytest.mark.parametrize("heads", [1, 4])
def test_e4m3_cache(heads: int) -> None:
    batch = chunks((345, 11_264), (1803, 1648), padded_rows=3)
    q, cache = random_queries(batch, heads), random_cache(batch, torch.float8_e4m3fn)
    scale = torch.tensor([0.37], device="cuda")
    check(batch, q, cache, run(MMA, batch, q, cache, scale))


def test_mixed_step_leaves_decode_rows_alone(kernel: str) -> None:
    """Chunks, then three decode requests of two tokens and two padded ones."""
    decode = [(2, 128), (2, 0), (2, 3047), (2, -2), (2, -2)]
    batch = chunks((3, 0), (0, 500), (100, 2600), (777, 5001), *decode)
    batch = dataclasses.replace(batch, num_decode=5, q_len=2)
    q, cache = random_queries(batch, 4), random_cache(batch)
    ids = run(kernel, batch, q, cache)
    check(batch, q, cache, ids)
    assert (ids[:, -10:] == POISON).all()


def test_no_context_rows(kernel: str) -> None:
    batch = dataclasses.replace(chunks((2, 128), (2, 5000)), num_decode=2, q_len=2)
    ids = run(kernel, batch, random_queries(batch, 4), random_cache(batch))
    assert (ids == POISON).all()


def test_rounds_when_the_scores_exceed_the_budget(kernel: str) -> None:
    """16,384 tokens with 8 heads on a table of 1,500 pages: 786 MB of scores, 256 MB at once."""
    batch = chunks((5000, 3001), (11_000, 9000), max_pages=1500, padded_rows=384)
    q, cache = random_queries(batch, 8), random_cache(batch)
    check(batch, q, cache, run(kernel, batch, q, cache), samples=1500)


def test_chunk_and_continuation_are_one_chunk(kernel: str) -> None:
    whole = chunks((1000, 9000), (700, 30_000))
    q, cache = random_queries(whole, 4), random_cache(whole)
    expected = run(kernel, whole, q, cache)
    for cut in (1, 77, 128, 333, 699):
        first = torch.cat([torch.arange(cut), 1000 + torch.arange(cut)]).cuda()
        rest = torch.cat([torch.arange(cut, 1000), torch.arange(1000 + cut, 1700)]).cuda()
        for tokens, lengths in (
            (first, [9000 + cut, 30_000 + cut]),
            (rest, whole.sequence_length.tolist()),
        ):
            sizes = [int((tokens < 1000).sum()), int((tokens >= 1000).sum())]
            part = dataclasses.replace(
                whole,
                cu_query_lens=torch.tensor([0, sizes[0], sum(sizes)], dtype=torch.int32).cuda(),
                sequence_length=torch.tensor(lengths, dtype=torch.int32).cuda(),
                num_tokens=sum(sizes),
            )
            assert torch.equal(run(kernel, part, q[tokens], cache), expected[:, tokens])


def test_agrees_with_decode_rows(kernel: str) -> None:
    """The same positions as decode rows of the plain kernel; rounding may decide a few."""
    batch = chunks((8, 5001), (8, 2060), (8, 128), (8, 70_000), (8, 2045))
    q, cache = random_queries(batch, 4), random_cache(batch)
    ids = run(kernel, batch, q, cache)
    decode = dataclasses.replace(batch, num_decode=5, q_len=8)
    plain = kernels.select(library(), "block_select", decode, q, cache)()
    assert int((ids != plain).any(dim=-1).sum()) <= 2


def test_equal_scores_go_to_the_lower_block(kernel: str) -> None:
    """All keys equal: blocks 0 .. 14 and the own one, for queries of zeros and NaN as well."""
    batch = chunks((300, 9000), (200, 150_000), (64, 20_000))
    q, cache = random_queries(batch, 4), random_cache(batch)
    cache[~cache.isnan()] = 1.0
    q[1], q[400] = -0.0, torch.nan
    ids = run(kernel, batch, q, cache)
    for request, (length, end) in enumerate(
        zip(batch.sequence_length.tolist(), batch.cu_query_lens.tolist()[1:], strict=True)
    ):
        begin = int(batch.cu_query_lens[request])
        own = torch.arange(length - end + begin, length, device="cuda") // BLOCK
        lowest = torch.arange(15, device="cuda").expand(len(own), 15)
        expected = torch.cat([lowest, own[:, None]], dim=1).int()
        assert torch.equal(ids[:, begin:end], expected.expand(4, -1, -1))


def test_clusters_needles_and_values_that_are_no_numbers(kernel: str) -> None:
    batch = chunks((300, 9000), (200, 150_000), (64, 70_000))
    q, cache = random_queries(batch, 4), random_cache(batch)
    needles = {1: [0, 77, 1100], 2: [1, 333, 543]}
    for request in range(3):
        own = batch.table[request].long()
        cache[own[20:60]] *= 2  # neighbours that are all better than the rest
        cache[own[9]] = torch.nan  # a whole block
        cache[own[10], ::2] = torch.nan  # its other keys still count
        cache[own[12], :, 5] = torch.inf  # +inf or -inf by the query's sign
        for block in needles.get(request, []):
            cache[own[block], block % BLOCK] = q[int(batch.cu_query_lens[request]), 2] * 4
    batch.table[2, 40] = -1  # a missing page loses
    ids = run(kernel, batch, q, cache)
    check(batch, q, cache, ids)
    for request, blocks in needles.items():
        first = ids[2, int(batch.cu_query_lens[request])]
        assert all((first == block).any() for block in blocks), first.tolist()


def test_a_captured_graph_follows_the_lengths(kernel: str) -> None:
    """Captured with one step, replayed with others of the same shapes."""
    batch = chunks((700, 9000), (300, 20_000), max_pages=200, padded_rows=24)
    q, cache = torch.randn(1024, 4, HEAD, device="cuda").bfloat16(), random_cache(batch)
    call = kernels.select(library(), kernel, batch, q, cache)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = call()
    for cut, lengths in ((700, [9700, 20_300]), (1, [130, 12_000]), (1000, [9000, 20_000])):
        batch.cu_query_lens.copy_(torch.tensor([0, cut, 1000] + [1000] * 24))
        batch.sequence_length[:2] = torch.tensor(lengths, device="cuda")
        ids.fill_(POISON)
        graph.replay()
        torch.cuda.synchronize()
        check(batch, q, cache, ids, samples=64)
