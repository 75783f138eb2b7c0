"""What the paged ops compute, written out with torch on the CPU; independent of the kernels.

The dtype of the arguments is the dtype of the arithmetic: float64 gives the exact answer, bf16 and
float32 what plain torch makes of it.
"""

from __future__ import annotations

import torch
from paged_steps import BLOCK, Step, lane
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """q [n, Hq, D], k and v [L, Hkv, D], visible bool [Hkv or 1, n, L] -> [n, Hq * D].

    A query that sees nothing is zero.
    """
    n, heads, size = q.shape
    groups = k.shape[1]
    grouped = q.reshape(n, groups, heads // groups, size).permute(1, 2, 0, 3)
    scores = (grouped @ k.permute(1, 2, 0)[:, None]) * scale
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=wide).nan_to_num(0.0).to(q.dtype)
    out = weights @ v.permute(1, 0, 2)[:, None]
    return out.permute(2, 0, 1, 3).reshape(n, heads * size)


def attend_step(
    step: Step, q: Tensor, keys: Tensor, values: Tensor, scale: float, block_ids: Tensor | None
) -> Tensor:
    """Attention of every real token of a step: [tokens, Hq * D], zero for padding.

    Args:
        keys, values: pages [P, B, Hkv, D].
        block_ids: [Hkv, tokens, top_k]; None for all blocks.
    """
    out = torch.zeros(step.num_tokens, q.shape[1] * q.shape[2], dtype=q.dtype)
    for request in range(len(step.requests)):
        own = [i for i, (r, _) in enumerate(step.tokens) if r == request]
        if not own:
            continue
        k, v = lane(step, keys, request), lane(step, values, request)
        position = torch.tensor([step.tokens[i][1] for i in own])
        visible = (torch.arange(len(k)) <= position[:, None])[None]
        if block_ids is not None:
            block = torch.arange(len(k)) // BLOCK
            visible = visible & (block_ids[:, own, :, None] == block).any(dim=2)
        out[own] = attention(q[own], k, v, visible, scale)
    return out


def norm_and_rotate(
    x: Tensor, weight: Tensor, epsilon: float, position_ids: Tensor, inv_freq: Tensor
) -> Tensor:
    """x [tokens, heads, D]: RMS norm per head, then NeoX rotation of the first channels, in fp64.

    Only the angle is an fp32 product, as the model defines it.
    """
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight.to(x.dtype)
    half = len(inv_freq)
    angle = (position_ids.to(torch.float32)[:, None] * inv_freq).to(torch.float64)[:, None]
    cos, sin = angle.cos(), angle.sin()
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def block_scores(step: Step, index_q: Tensor, index_pages: Tensor, token: int) -> Tensor:
    """Largest product of each head of a token with each visible block's keys: [heads, blocks].

    A NaN product counts as minus infinity.
    """
    request, position = step.tokens[token]
    products = index_q[token] @ lane(step, index_pages, request)[: position + 1].T
    products = products.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return torch.stack([s.amax(dim=-1) for s in products.split(BLOCK, dim=-1)], dim=-1)


def check_selection(
    ids: list[int], scores: list[float], top_k: int, init: int, local: int, epsilon: float
) -> int:
    """Assert that `ids` is a right answer for one row; how many blocks lie in the epsilon band.

    Blocks within `epsilon` of the cut may go either way, all others may not.
    """
    own = len(scores) - 1
    count = min(top_k, len(scores))
    chosen = ids[:count]
    assert ids[count:] == [-1] * (top_k - count), f"{ids}: expected {count} blocks, then -1"
    assert chosen == sorted(set(chosen)), f"{ids} is not ascending or repeats a block"
    assert chosen[-1] == own, f"{ids} does not end with the query's own block {own}"
    forced = {b for b in range(own + 1) if b < init or b > own - local}
    assert forced <= set(chosen), f"{ids} lacks forced blocks of {sorted(forced)}"
    ranked = sorted((scores[b] for b in range(own + 1) if b not in forced), reverse=True)
    free = count - len(forced)
    if free <= 0 or free >= len(ranked):
        return 0
    cut = ranked[free - 1]
    for block in range(own + 1):
        if block in forced:
            continue
        if scores[block] > cut + epsilon:
            assert block in chosen, f"block {block} ({scores[block]}) is above the cut {cut}: {ids}"
        if scores[block] < cut - epsilon:
            assert block not in chosen, f"block {block} ({scores[block]}) is below {cut}: {ids}"
    # The block at the cut itself is always within epsilon.
    return sum(abs(scores[b] - cut) <= epsilon for b in range(own + 1) if b not in forced) - 1
