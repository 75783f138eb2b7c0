"""M3BlockSelect: the blocks that each query attends to, by the index branch's scores."""

from __future__ import annotations

import numpy as np
from m3trt.runtime.reference.numerics import FLOAT8, Array, Float32, Int32, to_float32
from m3trt.runtime.reference.op import M3Op
from m3trt.runtime.reference.tokens import read_blocks, requests_of

_SCORE_BUDGET = 1 << 23
"""Elements of one chunk's [heads, queries, keys] score buffer."""

_OWN_BLOCK, _FORCED_BLOCK, _LARGEST_SCORE = np.float32(3e38), np.float32(2e38), np.float32(1e38)


class M3BlockSelect(M3Op):
    """index_q [N, Hi, Di] T, index_cache [P, B, Di], cu_query_lens, sequence_length, page table,
    decode_rows [, index_scale] -> block ids int32 [Hi, N, top_k].

    A block's score is the largest dot product over its visible keys (NaN loses). The query's own
    block, the first `init_blocks` and the last `local_blocks` are always taken; equal scores go to
    the lower id. Ids are logical blocks, ascending, own block last, then -1; padding rows are -1.
    """

    fields = ("block_size", "top_k", "init_blocks", "local_blocks")

    def _run(
        self,
        index_q: Array,
        index_cache: Array,
        cu_query_lens: Int32,
        sequence_length: Int32,
        page_table: Int32,
        decode_rows: Int32,
        *index_scale: Float32,
        block_size: int,
        top_k: int,
        init_blocks: int,
        local_blocks: int,
    ) -> tuple[Int32]:
        if index_cache.shape[1] != block_size:
            raise self.error(f"pages hold {index_cache.shape[1]} tokens, blocks {block_size}")
        if len(index_scale) != (index_cache.dtype == FLOAT8):
            raise self.error(f"{len(index_scale)} scales for a cache of {index_cache.dtype}")
        tokens, heads, _ = index_q.shape
        block_ids = np.full((heads, tokens, top_k), -1, np.int32)
        for request in requests_of(cu_query_lens, sequence_length, page_table):
            blocks = np.arange(-(-request.sequence_length // block_size))
            keys = to_float32(read_blocks(index_cache, request, blocks))
            if index_scale:
                keys = keys * index_scale[0]
            chunk = max(1, _SCORE_BUDGET // (heads * len(keys)))
            for begin in range(request.begin, request.end, chunk):
                end = min(begin + chunk, request.end)
                positions = np.arange(begin, end) - request.begin + request.first_position
                visible = (positions[-1] // block_size + 1) * block_size
                scores = block_scores(
                    to_float32(index_q[begin:end]), keys[:visible], positions, block_size
                )
                force(scores, positions // block_size, init_blocks, local_blocks)
                block_ids[:, begin:end] = select(scores, positions // block_size, top_k)
        return (block_ids,)


def block_scores(q: Float32, keys: Float32, positions: Array, block_size: int) -> Float32:
    """q [c, H, D], keys [blocks * B, D], positions [c] -> scores [H, c, blocks].

    Keys after the query's position do not count; without a comparable key a block gets -inf.
    """
    queries, heads, _ = q.shape
    scores = (q.transpose(1, 0, 2).reshape(heads * queries, -1) @ keys.T).reshape(
        heads, queries, -1
    )
    hidden = np.arange(len(keys)) > positions[:, None]
    scores[np.isnan(scores) | hidden] = -np.inf
    best: Float32 = scores.reshape(heads, queries, -1, block_size).max(axis=-1)
    return best


def force(scores: Float32, own: Array, init_blocks: int, local_blocks: int) -> None:
    """Raise the scores of blocks that are always taken above all others, the own block's most."""
    np.minimum(scores, _LARGEST_SCORE, out=scores)
    block, own = np.arange(scores.shape[-1]), own[:, None]
    forced = (block < init_blocks) | (block > own - local_blocks)
    scores[:, forced & (block <= own)] = _FORCED_BLOCK
    scores[:, block == own] = _OWN_BLOCK


def select(scores: Float32, own: Array, top_k: int) -> Int32:
    """The ids of the `top_k` highest scores [H, c, blocks], ascending and -1 padded.

    Invisible blocks score -inf and come after every visible one, so the first own + 1 ranks are
    the visible blocks.
    """
    heads, queries, blocks = scores.shape
    ranked = np.argsort(-scores, axis=-1, kind="stable")[..., :top_k].astype(np.int32)
    taken = np.minimum(own + 1, top_k)[:, None]
    ranked[:, np.arange(ranked.shape[-1]) >= taken] = blocks
    ranked.sort(axis=-1)
    ids = np.full((heads, queries, top_k), -1, np.int32)
    ids[..., : ranked.shape[-1]] = np.where(ranked == blocks, -1, ranked)
    return ids
