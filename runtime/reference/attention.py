"""M3SparseAttention and M3PagedAttention: causal attention over a paged cache."""

from __future__ import annotations

import itertools
from typing import ClassVar

import numpy as np
from m3trt.runtime.reference.numerics import (
    FLOAT8,
    Array,
    Float32,
    Int32,
    round_to,
    to_float32,
)
from m3trt.runtime.reference.op import M3Op
from m3trt.runtime.reference.tokens import RequestTokens, read_blocks, requests_of

_QUERIES_AT_ONCE = 64
"""Queries whose selected blocks are read together. Neighbours select much the same blocks."""


def attend(q: Float32, k: Float32, v: Float32, visible: Array, scale: float) -> Float32:
    """Softmax attention of one KV head.

    q [c, G, D], k and v [S, D], visible [c, S] -> [c, G, D]. A query that sees no key gives zeros.
    """
    queries, group, size = q.shape
    scores = (q.reshape(-1, size) @ k.T).reshape(queries, group, -1) * np.float32(scale)
    scores = np.where(visible[:, None], scores, np.float32(-np.inf))
    largest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isneginf(largest), 0, largest))
    total = weights.sum(axis=-1, keepdims=True)
    out: Float32 = (weights.reshape(queries * group, -1) @ v).reshape(queries, group, size)
    out /= np.maximum(total, 1)  # the total is at least 1 where any key is seen
    return out


class _PagedAttention(M3Op):
    fields = ("block_size", "softmax_scale")
    selects: ClassVar[bool]
    """Whether block ids follow the cache in the inputs."""

    def _run(
        self,
        q: Array,
        kv_cache: Array,
        *inputs: Array,
        block_size: int,
        softmax_scale: float,
    ) -> tuple[Array]:
        block_ids = inputs[0] if self.selects else None
        cu_query_lens, sequence_length, page_table, _, *kv_scale = inputs[self.selects :]
        tokens, heads, size = q.shape
        kv_heads = kv_cache.shape[3]
        if kv_cache.shape[2] != block_size:
            raise self.error(f"pages hold {kv_cache.shape[2]} tokens, blocks {block_size}")
        if heads % kv_heads:
            raise self.error(f"{heads} query heads over {kv_heads} KV heads")
        if len(kv_scale) != (kv_cache.dtype == FLOAT8):
            raise self.error(f"{len(kv_scale)} scales for a cache of {kv_cache.dtype}")
        scale = kv_scale[0] if kv_scale else None
        grouped = to_float32(q).reshape(tokens, kv_heads, heads // kv_heads, size)
        out = np.zeros(grouped.shape, np.float32)
        for request in requests_of(cu_query_lens, sequence_length, page_table):
            for begin in range(request.begin, request.end, _QUERIES_AT_ONCE):
                rows = slice(begin, min(begin + _QUERIES_AT_ONCE, request.end))
                positions = np.arange(rows.start, rows.stop) - request.begin
                positions += request.first_position
                for head in range(kv_heads):
                    if block_ids is None:
                        blocks = np.arange(positions[-1] // block_size + 1)
                        chosen = np.ones((len(positions), len(blocks)), bool)
                    else:
                        blocks, chosen = chosen_blocks(block_ids[head, rows])
                    k, v = (
                        _read_lane(kv_cache[:, lane, :, head], request, blocks, block_size, scale)
                        for lane in (0, 1)
                    )
                    keys = (blocks[:, None] * block_size + np.arange(block_size)).ravel()
                    visible = np.repeat(chosen, block_size, axis=1) & (keys <= positions[:, None])
                    out[rows, head] = attend(grouped[rows, head], k, v, visible, softmax_scale)
        return (round_to(out.reshape(tokens, heads * size), q.dtype),)


def chosen_blocks(block_ids: Int32) -> tuple[Array, Array]:
    """Block ids [c, top_k] -> the distinct ids [U] and who chose them, bool [c, U]."""
    blocks = np.unique(block_ids)
    blocks = blocks[blocks >= 0]
    return blocks, (block_ids[:, :, None] == blocks).any(axis=1)


def _read_lane(
    lane: Array, request: RequestTokens, blocks: Array, block_size: int, scale: Float32 | None
) -> Float32:
    """Keys or values of `blocks` in fp32; stale slots are 0, as a weight of 0 does not hide NaN."""
    x = to_float32(read_blocks(lane, request, blocks))
    if scale is not None:
        x = x * scale
    if len(blocks):
        x[len(x) - block_size :][request.sequence_length - blocks[-1] * block_size :] = 0
    return x


class M3SparseAttention(_PagedAttention):
    """q [N, Hq, D] T, kv_cache [P, 2, B, Hkv, D], block_ids int32 [Hkv, N, top_k], cu_query_lens,
    sequence_length, page table, decode_rows [, kv_scale] -> [N, Hq * D] T.

    Query head h uses KV head h // (Hq / Hkv). Keys up to the query's position inside the listed
    blocks; ids of -1 are skipped anywhere; padding rows are 0.
    """

    selects = True


class M3PagedAttention(_PagedAttention):
    """Like M3SparseAttention without block ids: every key up to the query's position."""

    selects = False


class M3VarlenAttention(M3Op):
    """q, k, v [N, H, D] T, cu_seqlens int32 [S + 1] -> [N, H * D] T: bidirectional attention
    inside each segment. Rows at or beyond cu_seqlens[S] are 0."""

    fields = ("softmax_scale",)

    def _run(
        self, q: Array, k: Array, v: Array, cu_seqlens: Int32, softmax_scale: float
    ) -> tuple[Array]:
        tokens, heads, size = q.shape
        q32, k32, v32 = to_float32(q), to_float32(k), to_float32(v)
        out = np.zeros((tokens, heads, size), np.float32)
        offsets = cu_seqlens.tolist()
        for begin, end in itertools.pairwise(offsets):
            for first in range(begin, end, _QUERIES_AT_ONCE):
                rows = slice(first, min(first + _QUERIES_AT_ONCE, end))
                everything = np.ones((rows.stop - rows.start, end - begin), bool)
                for head in range(heads):
                    out[rows, head] = attend(
                        q32[rows, None, head],
                        k32[begin:end, head],
                        v32[begin:end, head],
                        everything,
                        softmax_scale,
                    )[:, 0]
        return (round_to(out.reshape(tokens, heads * size), q.dtype),)
