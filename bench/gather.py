"""The naive way to decode selected blocks: copy them into contiguous memory, then attend densely.

Only a baseline: what the strided page view saves is this copy.
"""

from __future__ import annotations

from typing import Any

import torch
from m3trt.bench.kernel_library import BLOCK, HEAD
from m3trt.bench.msa_steps import TOP_K, Step
from torch import Tensor


def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def gather(  # type: ignore[no-untyped-def]
        kv,
        ids,
        table,
        out,
        table_width,
        q_len,
        heads: tl.constexpr,
        BLOCK: tl.constexpr,
        HEAD: tl.constexpr,
        TOP_K: tl.constexpr,
    ):
        row = tl.program_id(0)  # token, KV head
        slot = tl.program_id(1)
        half = tl.program_id(2)
        token = row // heads
        head = row % heads
        block = tl.load(ids + (head * (tl.num_programs(0) // heads) + token) * TOP_K + slot)
        if block < 0:
            return
        page = tl.load(table + token // q_len * table_width + block).to(tl.int64)
        position = tl.arange(0, BLOCK)[:, None]
        channel = tl.arange(0, HEAD)[None, :]
        source = ((page * 2 + half) * BLOCK + position) * heads + head
        target = ((row.to(tl.int64) * TOP_K + slot) * 2 + half) * BLOCK + position
        tl.store(out + target * HEAD + channel, tl.load(kv + source * HEAD + channel))

    return gather


def row_lengths(s: Step, ids: Tensor) -> Tensor:
    """Keys that each row [N * Hkv] reads of its blocks when they lie one behind the other."""
    valid = (ids >= 0).sum(2).T.flatten()
    last = s.positions().repeat_interleave(s.kv_heads) % BLOCK + 1
    return ((valid - 1) * BLOCK + last).int()


def gather_blocks(s: Step, ids: Tensor) -> Any:
    """A call that copies the blocks of every (token, KV head) into pages of its own, in order.

    Returns:
        the call, the pages [N * Hkv * 16, 2, 128, 1, D] that it fills, and the keys of each row
        [N * Hkv]
    """
    kernel, heads, rows = _kernel(), s.kv_heads, len(s.q) * s.kv_heads
    shape = (rows * TOP_K, 2, BLOCK, 1, HEAD)
    pages = torch.zeros(shape, dtype=s.kv_cache.dtype, device=s.q.device)
    grid = (rows, TOP_K, 2)
    table, q_len = s.batch.table, s.batch.q_len

    def call() -> None:
        kernel[grid](
            s.kv_cache, ids, table, pages, table.shape[1], q_len, heads, BLOCK, HEAD, TOP_K
        )

    return call, pages, row_lengths(s, ids)
