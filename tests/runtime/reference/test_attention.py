from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

pytestmark = pytest.mark.smoke

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
HQ, HKV, D, SCALE = 6, 2, 8, 0.3
TOP_K = 3


def softmax_attention(q, keys, values):
    logits = np.array([SCALE * (q @ k) for k in keys])
    weights = np.exp(logits - logits.max())
    return sum(w * v for w, v in zip(weights / weights.sum(), values, strict=True))


def exact(step, q, cache, block_ids):
    out = np.zeros((step.tokens, HQ, D))
    for token, request, position in step.rows():
        for head in range(HQ):
            kv = head // (HQ // HKV)
            own = position // step.block
            blocks = range(own + 1) if block_ids is None else block_ids[kv, token]
            keys = [
                j
                for b in blocks
                if b >= 0
                for j in range(b * step.block, (b + 1) * step.block)
                if j <= position
            ]
            if not keys:
                continue
            where = [step.slot(request, j) for j in keys]
            out[token, head] = softmax_attention(
                q[token, head].astype(np.float64),
                [cache[page, 0, slot, kv] for page, slot in where],
                [cache[page, 1, slot, kv] for page, slot in where],
            )
    return out.reshape(step.tokens, HQ * D)


def random_ids(step, rng):
    ids = np.full((HKV, step.tokens, TOP_K), -1, np.int32)
    for token, _, position in step.rows():
        own = position // step.block
        for head in range(HKV):
            earlier = rng.permutation(own)[: TOP_K - 1]
            chosen = [*sorted(earlier), own]
            ids[head, token, : len(chosen)] = chosen
    return ids


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16, FP8], ids=str)
@pytest.mark.parametrize("op", ["M3PagedAttention", "M3SparseAttention"])
def test_against_loops(run_op, step, rng, dtype, op):
    model_dtype = BF16 if dtype == FP8 else dtype
    q = rng.standard_normal((step.tokens, HQ, D)).astype(model_dtype)
    q[step.cu_query_lens[-1] :] = np.nan
    cache = step.fill(np.empty((step.pages, 2, step.block, HKV, D), dtype), 2, rng)
    ids = random_ids(step, rng) if op == "M3SparseAttention" else None
    y = run_op(
        op,
        q,
        cache,
        *([] if ids is None else [ids]),
        *step.batch,
        step.decode_rows,
        *([np.array([0.5], np.float32)] if dtype == FP8 else []),
        block_size=step.block,
        softmax_scale=SCALE,
    )[0]
    real = cache.astype(np.float64) * (0.5 if dtype == FP8 else 1)
    want = exact(step, q, real, ids)
    assert y.dtype == model_dtype
    rounding = 2**-8 if model_dtype == BF16 else 0
    assert np.all(np.abs(y.astype(np.float64) - want) <= rounding * np.abs(want) + 1e-6)
    assert not y[step.cu_query_lens[-1] :].any(), "padding rows are zero"


def test_ids_of_minus_one_are_skipped_anywhere(run_op, step, rng):
    q = rng.standard_normal((step.tokens, HQ, D)).astype(np.float32)
    cache = step.fill(np.empty((step.pages, 2, step.block, HKV, D), np.float32), 2, rng)
    ids = random_ids(step, rng)
    attributes = {"block_size": step.block, "softmax_scale": SCALE}
    tail = (*step.batch, step.decode_rows)
    straight = run_op("M3SparseAttention", q, cache, ids, *tail, **attributes)[0]
    moved = run_op("M3SparseAttention", q, cache, ids[..., ::-1].copy(), *tail, **attributes)[0]
    none = run_op("M3SparseAttention", q, cache, np.full_like(ids, -1), *tail, **attributes)[0]
    assert np.array_equal(straight, moved)
    assert not none.any()


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16], ids=str)
def test_varlen_attention(run_op, rng, dtype):
    cu_seqlens = np.array([0, 3, 3, 80, 81], np.int32)
    q, k, v = rng.standard_normal((3, 83, HQ, D)).astype(dtype)
    for x in (q, k, v):
        x[cu_seqlens[-1] :] = np.nan
    y = run_op("M3VarlenAttention", q, k, v, cu_seqlens, softmax_scale=SCALE)[0]
    want = np.zeros((83, HQ, D))
    q64, k64, v64 = (x.astype(np.float64) for x in (q, k, v))
    for begin, end in itertools.pairwise(cu_seqlens):
        for i in range(begin, end):
            for h in range(HQ):
                want[i, h] = softmax_attention(q64[i, h], k64[begin:end, h], v64[begin:end, h])
    want = want.reshape(83, -1)
    rounding = 2**-8 if dtype == BF16 else 0
    assert np.all(np.abs(y.astype(np.float64) - want) <= rounding * np.abs(want) + 1e-6)
