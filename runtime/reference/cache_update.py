"""M3CacheUpdate: per-head norm and partial RoPE of q, k and the index branch; writes the pages."""

from __future__ import annotations

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
from m3trt.runtime.reference.tokens import requests_of


class M3CacheUpdate(M3Op):
    """Inputs (dense layer): qkv [N, W] T, position_ids, cu_query_lens, sequence_length, page table,
    kv_cache [P, 2, B, Hkv, D], inv_freq f32 [rotary_dim / 2], q_norm, k_norm f32 [D] [, kv_scale].
    A sparse layer has, after k_norm: index_cache [P, B, Di], index_q_norm, index_k_norm f32 [Di],
    then the scales of those caches that are e4m3.

    Outputs: q [N, Hq, D] T, kv_cache; sparse layers also index_q [N, Hi, Di] T, index_cache.
    The caches are written in place and returned as the same arrays.
    """

    fields = (
        "num_heads",
        "num_kv_heads",
        "num_index_heads",
        "head_size",
        "index_head_size",
        "rotary_dim",
        "epsilon",
    )

    def _run(
        self,
        qkv: Array,
        position_ids: Int32,
        cu_query_lens: Int32,
        sequence_length: Int32,
        page_table: Int32,
        kv_cache: Array,
        inv_freq: Float32,
        q_norm: Float32,
        k_norm: Float32,
        *rest: Array,
        num_heads: int,
        num_kv_heads: int,
        num_index_heads: int,
        head_size: int,
        index_head_size: int,
        rotary_dim: int,
        epsilon: float,
    ) -> tuple[Array, ...]:
        index, scales = (rest[:3], rest[3:]) if num_index_heads else ((), rest)
        caches = [kv_cache, *index[:1]]
        needed = sum(cache.dtype == FLOAT8 for cache in caches)
        if len(scales) != needed:
            raise self.error(f"{len(scales)} cache scales, expected {needed}: one per e4m3 cache")
        scale = iter(scales)
        kv_scale = next(scale) if kv_cache.dtype == FLOAT8 else None

        heads = [num_heads, num_kv_heads, num_kv_heads]
        widths = [n * head_size for n in heads]
        if index:
            widths += [num_index_heads * index_head_size, index_head_size]
        if qkv.shape[1] != sum(widths):
            raise self.error(f"qkv has {qkv.shape[1]} columns, the heads need {sum(widths)}")
        parts = np.split(to_float32(qkv), np.cumsum(widths)[:-1], axis=1)
        tokens = qkv.shape[0]
        q, k, v = (x.reshape(tokens, n, head_size) for x, n in zip(parts[:3], heads, strict=True))

        cos, sin = rope_table(position_ids, inv_freq)
        q = rotate(rms_norm(q, q_norm, epsilon), cos, sin)
        k = rotate(rms_norm(k, k_norm, epsilon), cos, sin)
        token, page, slot = slots(
            cu_query_lens, sequence_length, page_table, position_ids, kv_cache.shape[2]
        )
        kv_cache[page, 0, slot] = quantise(k[token], kv_cache, kv_scale)
        kv_cache[page, 1, slot] = quantise(v[token], kv_cache, kv_scale)
        outputs: tuple[Array, ...] = (round_to(q, qkv.dtype), kv_cache)
        if not index:
            return outputs

        index_cache, index_q_norm, index_k_norm = index
        index_q = parts[3].reshape(tokens, num_index_heads, index_head_size)
        index_k = parts[4].reshape(tokens, 1, index_head_size)
        index_q = rotate(rms_norm(index_q, index_q_norm, epsilon), cos, sin)
        index_k = rotate(rms_norm(index_k, index_k_norm, epsilon), cos, sin)
        index_scale = next(scale) if index_cache.dtype == FLOAT8 else None
        index_cache[page, slot] = quantise(index_k[token, 0], index_cache, index_scale)
        return (*outputs, round_to(index_q, qkv.dtype), index_cache)


def rms_norm(x: Float32, weight: Float32, epsilon: float) -> Float32:
    """x [.., D] / rms(x) * weight; the weight already holds Gemma's 1 + w."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    normed: Float32 = x / np.sqrt(mean_square + np.float32(epsilon)) * weight
    return normed


def rope_table(position_ids: Int32, inv_freq: Float32) -> tuple[Float32, Float32]:
    """cos and sin [N, 1, len(inv_freq)] of the fp32 angles; evaluated in fp64, rounded once."""
    angle = (position_ids.astype(np.float32)[:, None] * inv_freq).astype(np.float64)[:, None]
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rotate(x: Float32, cos: Float32, sin: Float32) -> Float32:
    """NeoX rotation of x [N, heads, D]: channel i pairs with i + half; the rest passes."""
    half = cos.shape[-1]
    first, second, passed = np.split(x, [half, 2 * half], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, passed], axis=-1)


def slots(
    cu_query_lens: Int32,
    sequence_length: Int32,
    page_table: Int32,
    position_ids: Int32,
    block_size: int,
) -> tuple[Array, Array, Array]:
    """Where each real token is stored: (token, page, slot), without tokens that have no page."""
    tokens, pages = [], []
    for request in requests_of(cu_query_lens, sequence_length, page_table):
        mine = np.arange(request.begin, request.end)
        tokens.append(mine)
        pages.append(request.pages[position_ids[mine] // block_size])
    if not tokens:
        nothing = np.empty(0, np.intp)
        return nothing, nothing, nothing
    token, page = np.concatenate(tokens), np.concatenate(pages)
    token, page = token[page >= 0], page[page >= 0]
    return token, page, position_ids[token] % block_size


def quantise(x: Float32, cache: Array, scale: Float32 | None) -> Array:
    """One rounding to the cache's dtype; an e4m3 cache stores x / scale."""
    return round_to(x if scale is None else x / scale, cache.dtype)
