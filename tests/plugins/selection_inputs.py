"""Queries and index caches on the GPU for the selection kernels; NaN where nothing may be read."""

from __future__ import annotations

import torch
from m3trt.bench.kernel_library import BLOCK, HEAD, Batch
from torch import Tensor


def random_queries(batch: Batch, heads: int) -> Tensor:
    """NaN for padding."""
    q = torch.randn(batch.num_tokens, heads, HEAD, device="cuda")
    q[int(batch.cu_query_lens[-1]) :] = torch.nan
    return q.bfloat16()


def random_cache(batch: Batch, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """NaN in every slot that no token of the batch lies in."""
    cache = torch.randn(batch.num_pages, BLOCK, HEAD, device="cuda")
    used = torch.zeros(batch.num_pages, BLOCK, dtype=torch.bool, device="cuda")
    for row, length in enumerate(batch.sequence_length.tolist()):
        pages = batch.table[row, : -(-length // BLOCK)].long()
        slots = torch.arange(len(pages) * BLOCK, device="cuda").view(-1, BLOCK)
        used[pages[pages >= 0]] = (slots < length)[pages >= 0]
    cache[~used] = torch.nan
    return cache.to(dtype)
