"""Steps of one MSA layer for the benches: random caches on shuffled pages, selections, references.

Works on `device="meta"` too, where only shapes exist.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from m3trt.bench.kernel_library import BLOCK, HEAD, Batch
from torch import Tensor

TOP_K = 16
ROUNDED = 2048  # tables are so many tokens wide, or a multiple
SCALE = HEAD**-0.5
ROTATED_BYTES, MOST_COPIES = 200e6, 64
"""One graph's calls read more than this, so that no call finds its data in the L2 cache."""


@dataclass(frozen=True)
class Heads:
    """Of one rank: query, KV and index heads."""

    q: int
    kv: int
    index: int

    @property
    def group(self) -> int:
        return self.q // self.kv


TP1, TP4, TP8 = Heads(64, 4, 4), Heads(16, 1, 1), Heads(8, 1, 1)


@dataclass(frozen=True)
class Step:
    """What one layer's MSA reads; `longest`, `lengths` and `counts` are known on the host."""

    batch: Batch
    index_q: Tensor  # [N, G, D]
    index_cache: Tensor  # [P, 128, D]
    q: Tensor  # [N, Hq, D]
    kv_cache: Tensor  # [P, 2, 128, Hkv, D]
    longest: int  # sequence length that a graph must allow for
    lengths: tuple[int, ...]
    counts: tuple[int, ...]  # new tokens of each request

    @property
    def prefix(self) -> Tensor:
        new = self.batch.cu_query_lens.diff()
        return self.batch.sequence_length - new

    @property
    def kv_heads(self) -> int:
        return self.kv_cache.shape[3]

    @property
    def decoding(self) -> bool:
        return self.batch.num_decode > 0

    def positions(self) -> Tensor:
        """Of each token, int64 [N]."""
        starts = (n - m for n, m in zip(self.lengths, self.counts, strict=True))
        device = self.q.device
        parts = [
            torch.arange(start, start + count, device=device)
            for start, count in zip(starts, self.counts, strict=True)
        ]
        return torch.cat(parts)


@dataclass
class Pool:
    """Caches that all cases share; a rank with fewer KV heads sees more pages of the same bytes."""

    index: Tensor  # [P, 128, D]
    kv: Tensor  # [P, 2, 128, 4, D]

    @classmethod
    def random(cls, pages: int, kv_heads: int = 4, device: str = "cuda") -> Pool:
        def normal(*shape: int) -> Tensor:
            out = torch.empty(shape, dtype=torch.bfloat16, device=device)
            return out if device == "meta" else out.normal_()

        return cls(normal(pages, BLOCK, HEAD), normal(pages, 2, BLOCK, kv_heads, HEAD))

    @property
    def pages(self) -> int:
        return len(self.index)

    def fp8(self) -> Pool:
        return Pool(self.index.to(torch.float8_e4m3fn), self.kv.to(torch.float8_e4m3fn))

    def step(
        self,
        heads: Heads,
        lengths: list[int],
        new: list[int] | None = None,
        q_len: int = 1,
        longest: int = 0,
        seed: int = 0,
    ) -> Step:
        """Requests of these lengths, the new tokens among them: decode rows unless `new` is given.

        They share pages, each reading as many, where the pool has fewer than all of theirs.
        """
        device = self.index.device
        longest = -(-max(longest, *lengths) // ROUNDED) * ROUNDED
        batch = Batch.make(lengths, new, q_len, -(-longest // BLOCK), seed=seed, device=str(device))
        if batch.num_pages > self.pages and device.type != "meta":
            generator = torch.Generator(device).manual_seed(seed)
            shape = batch.table.shape
            drawn = torch.randint(self.pages, shape, device=device, generator=generator)
            batch.table = torch.where(batch.table < 0, -1, drawn.int())

        def normal(count: int) -> Tensor:
            shape = (batch.num_tokens, count, HEAD)
            return torch.empty(shape, device=device, dtype=torch.bfloat16).normal_()

        kv = self.kv.view(-1)[: self.pages * 2 * BLOCK * heads.kv * HEAD]
        return Step(
            batch,
            normal(heads.index),
            self.index,
            normal(heads.q),
            kv.view(self.pages, 2, BLOCK, heads.kv, HEAD),
            longest,
            tuple(lengths),
            tuple(new or [q_len] * len(lengths)),
        )


def copies(read_bytes: float) -> int:
    """Steps on pages of their own that a graph needs for a cold cache."""
    return max(1, min(MOST_COPIES, int(ROTATED_BYTES // read_bytes) + 1))


def shared_pages(lengths: list[int], pool: Pool) -> bool:
    return sum(-(-length // BLOCK) for length in lengths) + 3 > pool.pages


def random_blocks(s: Step, groups: int, seed: int = 0) -> Tensor:
    """Selections [groups, N, 16]: the own block and one of each fifteenth of the earlier ones."""
    own, generator = _own(s, seed)
    slots = torch.arange(TOP_K, device=own.device)
    first = slots[:-1] * own[:, None] // (TOP_K - 1)
    size = slots[1:] * own[:, None] // (TOP_K - 1) - first
    drawn = torch.rand(groups, *first.shape, device=own.device, generator=generator)
    return _with_own(first + (drawn * size).long(), own)


def realistic_blocks(s: Step, groups: int, seed: int = 0) -> Tensor:
    """Selections as trained models make them: block 0, the three before the own one, and three runs
    of neighbouring blocks that drift slowly from query to query.
    """
    own, generator = _own(s, seed)
    position = s.positions()
    parts = [torch.zeros(groups, len(own), 1, dtype=torch.int64, device=own.device)]
    third = (own - 4).clamp(min=0) // 3
    for part, width in enumerate((4, 4, 3)):
        phase = torch.rand(groups, 1, device=own.device, generator=generator)
        drift = torch.rand(groups, 1, device=own.device, generator=generator)
        where = (torch.sin(6.2832 * (phase + (0.5 + drift) * position / 8192)) + 1) / 2
        start = 1 + part * third + (where * (third - width).clamp(min=0)).long()
        parts.append(start[..., None] + torch.arange(width, device=own.device))
    before = own[:, None] - 3 + torch.arange(3, device=own.device)
    parts.append(before.expand(groups, -1, -1))
    return _with_own(torch.cat(parts, 2), own)


def _own(s: Step, seed: int) -> tuple[Tensor, torch.Generator]:
    return s.positions() // BLOCK, torch.Generator(s.q.device).manual_seed(seed)


def _with_own(earlier: Tensor, own: Tensor) -> Tensor:
    """15 earlier blocks and the own one; all of them where there are no more than 16."""
    chosen = torch.cat([earlier, own.expand(len(earlier), -1)[..., None]], 2)
    slots = torch.arange(TOP_K, device=own.device)
    few = torch.where(slots <= own[:, None], slots, -1)
    return torch.where((own < TOP_K)[:, None], few, chosen).int().contiguous()


def request_of(s: Step, token: int) -> tuple[int, int]:
    """The request of a token and the token's position."""
    for request, count in enumerate(s.counts):
        if token < count:
            return request, s.lengths[request] - count + token
        token -= count
    raise IndexError(token)


def block_scores(s: Step, token: int) -> Tensor:
    """fp32 [G, blocks] of one token: the reference of selections."""
    request, position = request_of(s, token)
    blocks = position // BLOCK + 1
    keys = s.index_cache[s.batch.table[request, :blocks].long()].float().flatten(0, 1)
    products = s.index_q[token].float() @ keys.T
    products[:, position + 1 :] = -torch.inf
    return products.view(len(products), blocks, BLOCK).amax(2)


def check_selection(ids: Tensor, s: Step, token: int) -> None:
    """The 16 best blocks, own one among them, up to what rounding of the scores may change.

    Raises:
        AssertionError: a better block was left out.
    """
    scores = block_scores(s, token)
    groups, blocks = scores.shape
    scores[:, -1] = torch.inf
    count = min(TOP_K, blocks)
    worst = scores.topk(count).values[:, -1]
    for group in range(groups):
        chosen = ids[group, token].long()
        real = chosen[chosen >= 0]
        assert len(real) == len(set(real.tolist())) == count, f"token {token}: {chosen.tolist()}"
        assert blocks - 1 in real, f"token {token}: the own block is missing: {chosen.tolist()}"
        margin = 2e-3 * worst[group].abs() if blocks > TOP_K else 0
        assert (scores[group, real] >= worst[group] - margin).all(), f"token {token}: {chosen}"
        left = torch.ones(blocks, dtype=torch.bool, device=scores.device)
        left[real] = False
        assert (scores[group, left] <= worst[group] + margin).all(), f"token {token}: {chosen}"


def reference_attention(s: Step, token: int, ids: Tensor | None = None) -> Tensor:
    """fp32 [Hq, D] of one token, over its selected blocks or over all earlier tokens."""
    request, position = request_of(s, token)
    group = s.q.shape[1] // s.kv_heads
    out = []
    for head in range(s.kv_heads):
        if ids is None:
            blocks = torch.arange(position // BLOCK + 1, device=s.q.device)
        else:
            blocks = ids[head, token].long()
            blocks = blocks[blocks >= 0]
        own = s.kv_cache[s.batch.table[request, blocks].long(), :, :, head].float()
        keys, values = (own[:, half].reshape(-1, HEAD) for half in range(2))
        place = (blocks[:, None] * BLOCK + torch.arange(BLOCK, device=blocks.device)).flatten()
        q = s.q[token, head * group : (head + 1) * group].float()
        logits = (q @ keys.T * SCALE).masked_fill(place > position, -torch.inf)
        out.append(torch.softmax(logits, dim=-1) @ values)
    return torch.cat(out)


def check_attention(
    out: Tensor, s: Step, token: int, ids: Tensor | None = None, limit: float = 0.01
) -> None:
    """One token of any layout of [N, Hq, D] against fp32 attention.

    Raises:
        AssertionError: they differ by more than bf16 explains.
    """
    want = reference_attention(s, token, ids)
    got = out.view(len(s.q), -1, HEAD)[token].float()
    error = ((got - want).norm() / want.norm()).item()
    assert error < limit, f"token {token}: relative error {error}"
