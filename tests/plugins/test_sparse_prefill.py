"""The block-major kernels of SparseAttention's context rows, called directly, against fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import plugin_harness as harness
import pytest
import torch
from m3trt.bench import kernel_library as kernels
from paged_steps import BLOCK, Request, Step, check_close, kv_pool, make_step, rows
from plugin_harness import gpu_missing

SCALE = 128**-0.5
TOP_K = 16
GROUPS = {"gqa16": (32, 2), "gqa8": (16, 2), "gqa8-one": (8, 1)}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.full,
    pytest.mark.skipif(bool(gpu_missing()), reason=gpu_missing() or "-"),
]


@pytest.fixture(scope="module")
def library() -> Any:
    return kernels.load()


@pytest.fixture(params=["wgmma", "mma"])
def wgmma(request: pytest.FixtureRequest) -> bool:
    if request.param == "wgmma" and not kernels.has_wgmma():
        pytest.skip("wgmma exists on compute capability 9.0 only")
    return bool(request.param == "wgmma")


def choose(step: Step, kv_heads: int, kind: str = "cold", seed: int = 9) -> torch.Tensor:
    """Selections [kv_heads, tokens, 16] on the GPU: the own block and, of those before it, random
    ones for each token ("cold"), the same for all ("hot"), -1 in places of its own ("holes") or
    runs of neighbours that drift from token to token ("runs"), also with holes ("holey-runs").
    """
    generator = torch.Generator().manual_seed(seed)
    positions = torch.tensor([position for _, position in step.tokens], dtype=torch.long)
    own = positions[:, None] // BLOCK
    blocks = torch.arange(int(own.max()) + 1 if len(own) else 1)
    ids = torch.zeros(kv_heads, step.num_tokens, TOP_K, dtype=torch.int32)  # padding: block 0
    for head in range(kv_heads):
        score = torch.rand(1 if "hot" in kind else len(own), len(blocks), generator=generator)
        if "runs" in kind:
            drifting = (blocks + positions[:, None] // 24) // 5 % len(blocks)
            score = torch.rand(len(blocks), generator=generator)[drifting] + 1e-3 * score
        score = score.expand(len(own), -1).masked_fill(blocks > own, -1.0)
        score = score.masked_fill(blocks == own, 2.0)
        best = score.topk(min(TOP_K, len(blocks)), dim=1)
        chosen = best.indices.masked_fill(best.values < 0, -1)
        if kind.startswith("hole") or kind == "hot-holes":
            hole = torch.rand(chosen.shape, generator=generator) < 0.2
            chosen = chosen.masked_fill(hole, -1)
            chosen[3::7] = -1
        ids[head, : len(own)] = -1
        ids[head, : len(own), : chosen.shape[1]] = chosen.to(torch.int32)
    return ids.cuda()


class Case:
    """Inputs on the GPU; `run` calls a kernel, `reference` says what it should give."""

    def __init__(self, step: Step, shape: str, kind: str = "cold", cache: str = "bf16") -> None:
        self.step, (self.heads, self.kv_heads) = step, GROUPS[shape]
        self.q = rows(step, 1, self.heads, 128, dtype="bf16", scale=2.0).cuda()
        self.pool = kv_pool(step, self.kv_heads, cache, seed=2).cuda()
        self.scale = torch.tensor([0.75]).cuda() if cache == "e4m3" else None
        self.ids = choose(step, self.kv_heads, kind)
        decode = step.inputs["decode_rows"].shape
        self.context = step.num_tokens - decode[0] * decode[1]
        self.real = min(self.context, step.num_real)

    def batch(self) -> kernels.Batch:
        step, packed = self.step, self.step.inputs
        names = ("cu_query_lens", "sequence_length", "kv_cache_block_offsets")
        tensors = (packed[name].cuda() for name in names)
        decode = packed["decode_rows"].shape
        return kernels.Batch(*tensors, step.num_tokens, *decode, step.num_pages)

    def run(self, library: Any, wgmma: bool, rounds: tuple[int, int] = (0, 0)) -> torch.Tensor:
        """Block by block."""
        inputs = (self.q, self.pool, self.ids)
        return self.repeat(
            kernels.sparse_prefill(library, self.batch(), *inputs, wgmma, rounds, self.scale)
        )

    def run_rows(self, library: Any) -> torch.Tensor:
        """Query by query."""
        inputs = (self.q, self.pool, self.ids)
        return self.repeat(kernels.selected_rows(library, self.batch(), *inputs, self.scale))

    def run_dense(self, library: Any, wgmma: bool) -> torch.Tensor:
        """All blocks that a tile's rows chose, with a mask."""
        inputs = (self.q, self.pool, self.ids)
        return self.repeat(kernels.dense_rows(library, self.batch(), *inputs, wgmma))

    def repeat(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        out = call().clone()
        for _ in range(2):
            assert harness.same_bits(call(), out), "the bits differ between runs"
        assert not torch.isfinite(out[self.context :]).any(), "decode rows were written"
        return out[: self.context]

    def reference(self, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows `tokens` in the arithmetic of `dtype`."""
        device = harness.REFERENCE_DEVICE
        place = torch.tensor(self.step.tokens)[tokens.cpu()].to(device)
        request, position = place[:, 0], place[:, 1]
        table = self.step.inputs["kv_cache_block_offsets"].to(device)
        all_ids, all_q, pool = self.ids[:, tokens].to(device), self.q[tokens], self.pool.to(device)
        group = self.heads // self.kv_heads
        out = []
        for head in range(self.kv_heads):
            ids = all_ids[head].long()
            key = ids[..., None] * BLOCK + torch.arange(BLOCK, device=device)
            page = table[request[:, None], ids.clamp(min=0)].long()
            visible = (ids >= 0)[..., None] & (key <= position[:, None, None])
            chosen = pool[page.clamp(min=0), :, :, head].to(torch.float32)
            if self.scale is not None:
                chosen = chosen * self.scale.to(device)
            chosen = chosen.masked_fill(~visible[:, :, None, :, None], 0.0).to(dtype)
            k, v = (chosen[:, :, half].flatten(1, 2) for half in range(2))
            q = all_q[:, head * group : (head + 1) * group].to(device, dtype)
            score = (q @ k.transpose(1, 2)) * SCALE
            score = score.masked_fill(~visible.flatten(1)[:, None], -1e30)
            wide = torch.promote_types(dtype, torch.float32)
            weights = torch.softmax(score, dim=-1, dtype=wide).to(dtype)
            seen = visible.flatten(1).any(1)[:, None, None]
            out.append((weights @ v).masked_fill(~seen, 0.0))
        return torch.cat(out, dim=1).flatten(1).cuda()

    def check(self, out: torch.Tensor, most: int = 600) -> None:
        assert (out[self.real :] == 0).all(), "padding rows are not zero"
        assert torch.isfinite(out).all()
        if self.real == 0:
            return
        tokens = torch.arange(self.real, device="cuda")
        if self.real > most:  # the ends, and some in between
            some = torch.randperm(self.real, generator=torch.Generator().manual_seed(1))[:most]
            tokens = torch.cat([tokens[:40], tokens[-40:], some.cuda()]).unique()
        for piece in tokens.split(64):
            exact, plain = (self.reference(piece, t) for t in (torch.float64, torch.bfloat16))
            check_close(out[piece], exact, plain)


LENGTHS = (1, 2, 7, 31, 63, 127, 128, 129, 130, 255, 256, 257, 511, 512, 513)
STEPS: dict[str, Callable[[], Step]] = {
    "lengths": lambda: make_step([Request(n, n) for n in LENGTHS], padded_tokens=5),
    "chunk-ends": lambda: make_step(
        [Request(n, 4500 + n + shift) for n, shift in ((1, 0), (60, 3), (61, 67), (128, 60))]
        + [Request(40, n) for n in (2047, 2048, 2049, 4095, 4096, 4097)]
    ),
    "many-chunks": lambda: make_step([Request(n % 7 + 1, 140 * n + 9) for n in range(40)]),
    "mixed": lambda: make_step(
        [Request(3, 3), Request(0, 0), Request(100, 700)], [130, 2, 2049], q_len=2, padded_rows=2
    ),
    "whole": lambda: make_step(
        [Request(300, 2200), Request(7, 7), Request(61, 2060), Request(130, 2049), Request(9, 2047)]
    ),
    "near": lambda: make_step(
        [Request(300, 4096), Request(7, 7), Request(61, 2060), Request(700, 2900)], padded_tokens=3
    ),
    "partly-near": lambda: make_step(
        [Request(300, 4200), Request(5, 9000), Request(130, 4097), Request(9, 4095)]
    ),
    "short": lambda: make_step(
        [Request(n, 1800) for n in (1, 100, 700)], [130, 2], q_len=2, padded_rows=2
    ),
    "all-padding": lambda: make_step([], padded_tokens=9),
    "empty": lambda: make_step([]),
}


@pytest.mark.parametrize("shape", GROUPS)
@pytest.mark.parametrize("step", STEPS)
def test_attends_to_the_selection(library: Any, step: str, shape: str, wgmma: bool) -> None:
    case = Case(STEPS[step](), shape)
    case.check(case.run(library, wgmma))


@pytest.mark.parametrize("kind", ["hot", "holes", "runs", "holey-runs", "hot-holes"])
@pytest.mark.parametrize("shape", ["gqa16", "gqa8"])
def test_selections(library: Any, shape: str, kind: str, wgmma: bool) -> None:
    step = make_step([Request(300, 5000), Request(1800, 9000), Request(90, 4120)])
    case = Case(step, shape, kind)
    case.check(case.run(library, wgmma))


@pytest.mark.parametrize("kind", ["cold", "runs", "holey-runs"])
@pytest.mark.parametrize("shape", ["gqa16", "gqa8"])
def test_few_queries_of_a_block(library: Any, shape: str, kind: str, wgmma: bool) -> None:
    """Less than 16 on average: the kernel with three blocks under way."""
    case = Case(make_step([Request(200, 30_000)]), shape, kind)
    case.check(case.run(library, wgmma))


@pytest.mark.parametrize(
    ("requests", "shape", "kind"),
    [
        pytest.param([(8192, 8192)], "gqa8-one", "cold", id="8k"),
        pytest.param([(16384, 16384)], "gqa16", "runs", id="16k"),
        pytest.param(
            [(332, 5332), (2980, 9300), (12928, 22912)], "gqa16", "cold", id="three-requests"
        ),
        pytest.param([(2048, 262_144)], "gqa16", "runs", id="2k-on-256k"),
    ],
)
def test_large_chunks(
    library: Any, requests: Sequence[tuple[int, int]], shape: str, kind: str, wgmma: bool
) -> None:
    """Thread blocks take the last parts of the work as they become free."""
    case = Case(make_step([Request(*request) for request in requests]), shape, kind)
    case.check(case.run(library, wgmma), most=200)


def with_rows_of_15(shape: str, apart: int, first: list[int]) -> Case:
    """512 tiles of tokens that choose their own block and 15 others, from `first` of the token's
    number modulo 4 on, so many blocks apart."""
    count = 65536 // GROUPS[shape][0]
    case = Case(make_step([Request(count, 68 * BLOCK + count)]), shape, "hot")
    token = torch.arange(count, device="cuda")[:, None]
    case.ids[:, :, 0] = 68 + token[:, 0] // BLOCK
    starts = torch.tensor(first, device="cuda")[token % len(first)]
    case.ids[:, :, 1:] = starts + apart * torch.arange(15, device="cuda")
    return case


@pytest.mark.parametrize("shape", ["gqa16", "gqa8"])
def test_tiles_of_up_to_32_blocks_are_joined(library: Any, shape: str) -> None:
    """Then they have the bits of a dense kernel with a mask, and not with one block more."""
    if not kernels.has_wgmma():
        pytest.skip("the mma.sync kernel joins nothing behind the first 32 blocks")
    case = with_rows_of_15(shape, 2, [0, 32, 2, 0])
    dense = case.run_dense(library, wgmma=True)
    assert harness.same_bits(case.run(library, wgmma=True), dense)
    case.ids[:, 4::64, 1:] += 34
    out = case.run(library, wgmma=True)
    tile = 128 * case.kv_heads // case.heads
    place = torch.arange(len(out), device="cuda") % 64
    assert harness.same_bits(out[place >= tile], dense[place >= tile])
    others = (place < tile) & (place != 4)
    assert not harness.same_bits(out[others], dense[others])
    case.check(out)


@pytest.mark.parametrize(("second", "joined"), [(11, True), (12, False)], ids=["27", "28"])
@pytest.mark.parametrize("shape", ["gqa16", "gqa8"])
def test_tiles_are_joined_where_it_pays(
    library: Any, shape: str, second: int, joined: bool
) -> None:
    """15 blocks in a row make 8 partial results, for which up to 27 blocks together are less."""
    if not kernels.has_wgmma():
        pytest.skip("the mma.sync kernel joins nothing behind the first 32 blocks")
    case = with_rows_of_15(shape, 1, [0, second, 5, 0])
    dense = case.run_dense(library, wgmma=True)
    out = case.run(library, wgmma=True)
    assert harness.same_bits(out, dense) == joined
    case.check(out)


@pytest.mark.parametrize("kind", ["cold", "runs"])
@pytest.mark.parametrize("rounds", [(100, 1), (333, 2), (64, 1)])
@pytest.mark.parametrize("count", [300, 1100], ids=["few", "many"])
def test_rounds_give_the_same_bits(
    library: Any, count: int, rounds: tuple[int, int], kind: str, wgmma: bool
) -> None:
    """Which blocks have a partial result in common is up to the token alone, which tiles are
    joined, where many tokens let them be chosen, to their own tokens."""
    step = make_step([Request(count, 5000), Request(31, 900)], padded_tokens=7)
    case = Case(step, "gqa16", kind)
    assert harness.same_bits(case.run(library, wgmma, rounds), case.run(library, wgmma))


@pytest.mark.parametrize("kind", ["cold", "runs"])
def test_a_chunk_and_its_continuation(library: Any, kind: str, wgmma: bool) -> None:
    """Cut in the middle of a block, the second part has the rows that it has in one chunk."""
    whole, part = (make_step([Request(n, 4100)], seed=4) for n in (700, 333))
    cases = [Case(step, "gqa16", kind) for step in (whole, part)]
    cases[1].q = cases[0].q[-333:].contiguous()
    cases[1].ids = cases[0].ids[:, -333:].contiguous()
    out = [case.run(library, wgmma) for case in cases]
    assert harness.same_bits(out[0][-333:].contiguous(), out[1])


@pytest.mark.parametrize("shape", ["gqa16", "gqa8"])
def test_e4m3_cache(library: Any, shape: str) -> None:
    case = Case(make_step([Request(300, 5000), Request(129, 129)]), shape, cache="e4m3")
    case.check(case.run(library, wgmma=False))


@pytest.mark.parametrize("shape", ["gqa16", "gqa8"])
def test_rows_that_see_all_blocks_have_the_bits_of_dense_attention(
    library: Any, shape: str, wgmma: bool
) -> None:
    """Up to position 2,047 the 16 blocks are all there are, wherever -1 stands in between."""
    case = Case(make_step([Request(700, 2300), Request(90, 90)], padded_tokens=3), shape)
    positions = torch.tensor([position for _, position in case.step.tokens])
    case.ids = case.ids[..., torch.randperm(TOP_K)].contiguous()
    case.ids[0, 5, case.ids[0, 5] == 3] = -1  # one head of one row misses a block
    out = case.run(library, wgmma)
    dense = kernels.prefill(library, case.batch(), case.q, case.pool, wgmma)()
    whole = (positions < TOP_K * BLOCK).cuda()
    whole[5] = False
    assert harness.same_bits(out[: case.real][whole], dense[: case.real][whole])
    half = out.shape[1] // case.kv_heads
    assert not harness.same_bits(out[5, :half], dense[5, :half])
    assert harness.same_bits(out[5, half:], dense[5, half:])
    case.check(out)


@pytest.mark.parametrize("kind", ["cold", "runs"])
def test_small_chunks_are_inverted_like_large_ones(library: Any, kind: str, wgmma: bool) -> None:
    """A request has the bits that it has among 40 others, whose inversion takes three kernels."""
    alone, among = (
        Case(make_step([Request(300, 9000)] + [Request(3, 3)] * others, seed=4), "gqa16", kind)
        for others in (0, 40)
    )
    among.q[:300] = alone.q
    among.ids[:, :300] = alone.ids
    pages = [alone.step.pages[0], among.step.pages[0]]
    among.pool[pages[1]] = alone.pool[pages[0]]
    assert harness.same_bits(
        among.run(library, wgmma)[:300].contiguous(), alone.run(library, wgmma)
    )


@pytest.mark.parametrize("cache", ["bf16", "e4m3"])
@pytest.mark.parametrize("shape", GROUPS)
@pytest.mark.parametrize("step", [name for name in STEPS if name not in ("all-padding", "empty")])
def test_query_by_query(library: Any, step: str, shape: str, cache: str) -> None:
    case = Case(STEPS[step](), shape, "holes", cache)
    case.check(case.run_rows(library))


@pytest.mark.parametrize("kind", ["cold", "holes"])
@pytest.mark.parametrize("shape", GROUPS)
@pytest.mark.parametrize("step", ["lengths", "near", "short"])
def test_dense_rows(library: Any, step: str, shape: str, kind: str, wgmma: bool) -> None:
    case = Case(STEPS[step](), shape, kind)
    case.check(case.run_dense(library, wgmma))


@pytest.mark.parametrize(
    ("requests", "columns", "route"),
    [
        pytest.param([(64, 2112)], 17, "blocks", id="64-on-2k"),
        pytest.param([(511, 2048)], 16, "dense", id="511-on-2k"),
        pytest.param([(511, 2048)], 17, "blocks", id="511-on-2k-with-room"),
        pytest.param([(512, 3000)], 24, "dense", id="512-on-3k"),
        pytest.param([(512, 3000)], 25, "blocks", id="512-on-3k-with-room"),
        pytest.param([(64, 32_768)], 256, "rows", id="64-on-32k"),
        pytest.param([(64, 32_640)], 255, "blocks", id="64-on-less"),
        pytest.param([(65, 1_048_576)], 8192, "blocks", id="65-on-1M"),
        pytest.param([(40, 40_000), (24, 100)], 8192, "rows", id="two"),
        pytest.param([(1, 1)], 16, "rows", id="one"),
        pytest.param([(2048, 2048)], 16, "dense", id="2k-on-0"),
        pytest.param([(2048, 2048)], 32, "dense", id="2k-on-0-with-room"),
        pytest.param([(2048, 2048)], 33, "blocks", id="2k-on-0-with-more"),
        pytest.param([(8192, 8192)], 64, "blocks", id="8k-on-0"),
        pytest.param([], 300, "blocks", id="none"),
    ],
)
def test_route(library: Any, requests: list[tuple[int, int]], columns: int, route: str) -> None:
    """By the number of tokens and heads and the width of the page table alone."""
    lengths, new = [length for _, length in requests], [count for count, _ in requests]
    batch = kernels.Batch.make(lengths, new, max_pages=columns)
    assert kernels.route(library, batch, 64, 4, TOP_K) == route
