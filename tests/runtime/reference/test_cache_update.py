from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

pytestmark = pytest.mark.smoke

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
HQ, HKV, HI, D, DI, ROTARY, EPS = 4, 2, 2, 8, 6, 4, 1e-6
DENSE = {
    "num_heads": HQ,
    "num_kv_heads": HKV,
    "num_index_heads": 0,
    "head_size": D,
    "index_head_size": DI,
    "rotary_dim": ROTARY,
    "epsilon": EPS,
}
SPARSE = DENSE | {"num_index_heads": HI}
INV_FREQ = (10000.0 ** (-np.arange(0, ROTARY, 2) / ROTARY)).astype(np.float32)


def normed_and_rotated(head, weight, position):
    x = head.astype(np.float64)
    x = x / np.sqrt(np.mean(x**2) + EPS) * weight.astype(np.float64)
    out = x.copy()
    half = ROTARY // 2
    for i in range(half):
        angle = float(np.float32(position) * INV_FREQ[i])
        a, b = x[i], x[i + half]
        out[i] = a * np.cos(angle) - b * np.sin(angle)
        out[i + half] = b * np.cos(angle) + a * np.sin(angle)
    return out


def assert_rounded(found, want):
    rounding = {np.dtype(np.float32): 2**-22, BF16: 2**-8, FP8: 2**-4}[found.dtype]
    small = 2**-9 if found.dtype == FP8 else 1e-6
    assert np.all(np.abs(found.astype(np.float64) - want) <= rounding * np.abs(want) + small)


@pytest.fixture
def case(step, rng):
    """make(dtype, cache dtype, sparse) -> inputs of the op for `step`."""

    def make(dtype, cache_dtype, sparse):
        width = (HQ + 2 * HKV) * D + (HI + 1) * DI * sparse
        qkv = rng.standard_normal((step.tokens, width)).astype(dtype) * dtype.type(2)
        norms = [rng.uniform(0.5, 1.5, n).astype(np.float32) for n in (D, D, DI, DI)]
        kv = np.full((step.pages, 2, step.block, HKV, D), np.nan, cache_dtype)
        index = np.full((step.pages, step.block, DI), np.nan, cache_dtype)
        inputs = [qkv, step.positions, *step.batch, kv, INV_FREQ, *norms[:2]]
        if sparse:
            inputs += [index, *norms[2:]]
        if cache_dtype == FP8:
            inputs += [np.array([0.5], np.float32), np.array([0.25], np.float32)][: 1 + sparse]
        return inputs

    return make


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(np.dtype(np.float32), np.dtype(np.float32)), (BF16, BF16), (BF16, FP8)],
    ids=["float32", "bfloat16", "e4m3"],
)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_against_loops(run_op, step, case, dtype, cache_dtype, sparse):
    inputs = case(dtype, cache_dtype, sparse)
    qkv, kv = inputs[0].astype(np.float64), inputs[5]
    q_norm, k_norm = inputs[7:9]
    out = run_op("M3CacheUpdate", *inputs, outputs=2 + 2 * sparse, **(SPARSE if sparse else DENSE))
    assert out[1] is kv, "the cache must be updated in place"
    if sparse:
        index, iq_norm, ik_norm = inputs[9:12]
        assert out[3] is index, "the index cache must be updated in place"
    kv_scale, index_scale = (0.5, 0.25) if cache_dtype == FP8 else (1, 1)
    written = np.zeros((step.pages, step.block), bool)
    for token, request, position in step.rows():
        page, slot = step.slot(request, position)
        written[page, slot] = True
        row = qkv[token]
        for h in range(HQ):
            want = normed_and_rotated(row[h * D : (h + 1) * D], q_norm, position)
            assert_rounded(out[0][token, h], want)
        for h in range(HKV):
            k, v = (row[(HQ + n + h) * D :][:D] for n in (0, HKV))
            assert_rounded(kv[page, 0, slot, h], normed_and_rotated(k, k_norm, position) / kv_scale)
            assert_rounded(kv[page, 1, slot, h], v / kv_scale)
        if sparse:
            rest = row[(HQ + 2 * HKV) * D :].reshape(HI + 1, DI)
            for h in range(HI):
                want = normed_and_rotated(rest[h], iq_norm, position)
                assert_rounded(out[2][token, h], want)
            want = normed_and_rotated(rest[HI], ik_norm, position) / index_scale
            assert_rounded(index[page, slot], want)
    untouched = np.isnan(kv.astype(np.float32)).all(axis=(1, 3, 4))
    assert np.array_equal(untouched, ~written), "only the slots of real tokens are written"


def test_e4m3_saturates(run_op, step, case):
    inputs = case(BF16, FP8, False)
    inputs[0] *= BF16.type(1e6)
    kv = run_op("M3CacheUpdate", *inputs, outputs=2, **DENSE)[1]
    page, slot = step.slot(0, 0)
    assert set(np.abs(kv[page, 1, slot].astype(np.float32)).ravel()) == {448.0}


def test_a_token_without_page_is_skipped(run_op, step, case):
    inputs = case(BF16, BF16, False)
    inputs[4][0] = -1
    kv = run_op("M3CacheUpdate", *inputs, outputs=2, **DENSE)[1]
    assert np.isnan(kv[-1].astype(np.float32)).all()


def test_a_missing_scale_is_an_error(run_op, case):
    inputs = case(BF16, FP8, True)[:-1]
    with pytest.raises(ValueError, match="1 cache scales, expected 2"):
        run_op("M3CacheUpdate", *inputs, outputs=4, **SPARSE)
