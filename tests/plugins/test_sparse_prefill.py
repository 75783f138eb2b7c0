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
    ones for each token ("cold"), the same for all ("hot") or -1 in places of its own ("holes").
    """
    generator = torch.Generator().manual_seed(seed)
    positions = torch.tensor([position for _, position in step.tokens], dtype=torch.long)
    own = positions[:, None] // BLOCK
    blocks = torch.arange(int(own.max()) + 1 if len(own) else 1)
    ids = torch.zeros(kv_heads, step.num_tokens, TOP_K, dtype=torch.int32)  # padding: block 0
    for head in range(kv_heads):
        score = torch.rand(1 if kind == "hot" else len(own), len(blocks), generator=generator)
        score = score.expand(len(own), -1).masked_fill(blocks > own, -1.0)
        score = score.masked_fill(blocks == own, 2.0)
        best = score.topk(min(TOP_K, len(blocks)), dim=1)
        chosen = best.indices.masked_fill(best.values < 0, -1)
        if kind == "holes":
            hole = torch.rand(chosen.shape, generator=generator) < 0.2
            chosen = chosen.masked_fill(hole, -1)
            chosen[3::7] = -1
        ids[head, : len(own)] = -1
        ids[head, : len(own), : chosen.shape[1]] = chosen.to(torch.int32)
    return ids.cuda()


def products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, matrix by matrix: under racecheck before 2026.4 cuBLAS crashes with batched ones."""
    return torch.stack([x @ y for x, y in zip(a, b, strict=True)])


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

    def run(self, library: Any, wgmma: bool, rounds: tuple[int, int] = (0, 0)) -> torch.Tensor:
        step, packed = self.step, self.step.inputs
        names = ("cu_query_lens", "sequence_length", "kv_cache_block_offsets")
        decode = packed["decode_rows"].shape
        batch = kernels.Batch(
            *(packed[name].cuda() for name in names), step.num_tokens, *decode, step.num_pages
        )
        call = kernels.sparse_prefill(
            library, batch, self.q, self.pool, self.ids, wgmma, rounds, self.scale
        )
        out = call().clone()
        for _ in range(2):
            assert harness.same_bits(call(), out), "the bits differ between runs"
        return out[: self.context]

    def reference(self, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows `tokens` in the arithmetic of `dtype`."""
        packed = self.step.inputs
        place = torch.tensor(self.step.tokens)[tokens.cpu()].cuda()
        request, position = place[:, 0], place[:, 1]
        table = packed["kv_cache_block_offsets"].cuda()
        group = self.heads // self.kv_heads
        out = []
        for head in range(self.kv_heads):
            ids = self.ids[head, tokens].long()
            key = ids[..., None] * BLOCK + torch.arange(BLOCK, device="cuda")
            page = table[request[:, None], ids.clamp(min=0)].long()
            visible = (ids >= 0)[..., None] & (key <= position[:, None, None])
            chosen = self.pool[page.clamp(min=0), :, :, head].to(torch.float32)
            if self.scale is not None:
                chosen = chosen * self.scale
            chosen = chosen.masked_fill(~visible[:, :, None, :, None], 0.0).to(dtype)
            k, v = (chosen[:, :, half].flatten(1, 2) for half in range(2))
            q = self.q[tokens, head * group : (head + 1) * group].to(dtype)
            score = products(q, k.transpose(1, 2)) * SCALE
            score = score.masked_fill(~visible.flatten(1)[:, None], -1e30)
            wide = torch.promote_types(dtype, torch.float32)
            weights = torch.softmax(score, dim=-1, dtype=wide).to(dtype)
            seen = visible.flatten(1).any(1)[:, None, None]
            out.append(products(weights, v).masked_fill(~seen, 0.0))
        return torch.cat(out, dim=1).flatten(1)

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
        [Request(n, 2500 + n + shift) for n, shift in ((1, 0), (60, 3), (61, 67), (128, 60))]
        + [Request(40, n) for n in (2047, 2048, 2049)]
    ),
    "many-chunks": lambda: make_step([Request(n % 7 + 1, 40 * n + 9) for n in range(40)]),
    "mixed": lambda: make_step(
        [Request(3, 3), Request(0, 0), Request(100, 700)], [130, 2, 2049], q_len=2, padded_rows=2
    ),
    "all-padding": lambda: make_step([], padded_tokens=9),
    "empty": lambda: make_step([]),
}


@pytest.mark.parametrize("shape", GROUPS)
@pytest.mark.parametrize("step", STEPS)
def test_attends_to_the_selection(library: Any, step: str, shape: str, wgmma: bool) -> None:
    case = Case(STEPS[step](), shape)
    case.check(case.run(library, wgmma))


@pytest.mark.parametrize("kind", ["hot", "holes"])
@pytest.mark.parametrize("shape", ["gqa16", "gqa8"])
def test_selections(library: Any, shape: str, kind: str, wgmma: bool) -> None:
    case = Case(make_step([Request(300, 5000), Request(700, 700)]), shape, kind)
    case.check(case.run(library, wgmma))


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param([(8192, 8192)], id="8k"),
        pytest.param([(16384, 16384)], id="16k"),
        pytest.param([(332, 5332), (2980, 9300), (12928, 22912)], id="three-requests"),
    ],
)
def test_large_chunks(library: Any, requests: Sequence[tuple[int, int]], wgmma: bool) -> None:
    case = Case(make_step([Request(*request) for request in requests]), "gqa8-one")
    case.check(case.run(library, wgmma), most=200)


@pytest.mark.parametrize("rounds", [(100, 1), (333, 2), (64, 1)])
def test_rounds_give_the_same_bits(library: Any, rounds: tuple[int, int], wgmma: bool) -> None:
    """A partial result is of one block, so it does not matter what else is computed with it."""
    case = Case(make_step([Request(300, 5000), Request(31, 900)], padded_tokens=7), "gqa16")
    assert harness.same_bits(case.run(library, wgmma, rounds), case.run(library, wgmma))


def test_a_chunk_and_its_continuation(library: Any, wgmma: bool) -> None:
    """Cut in the middle of a block, the second part has the rows that it has in one chunk."""
    whole, part = (make_step([Request(n, 1500)], seed=4) for n in (700, 333))
    cases = [Case(step, "gqa16") for step in (whole, part)]
    cases[1].q = cases[0].q[-333:].contiguous()
    cases[1].ids = cases[0].ids[:, -333:].contiguous()
    out = [case.run(library, wgmma) for case in cases]
    assert harness.same_bits(out[0][-333:].contiguous(), out[1])


@pytest.mark.parametrize("shape", ["gqa16", "gqa8"])
def test_e4m3_cache(library: Any, shape: str) -> None:
    case = Case(make_step([Request(300, 5000), Request(129, 129)]), shape, cache="e4m3")
    case.check(case.run(library, wgmma=False))
