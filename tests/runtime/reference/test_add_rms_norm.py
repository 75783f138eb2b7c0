from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

pytestmark = pytest.mark.smoke

BF16 = np.dtype(ml_dtypes.bfloat16)
EPSILON = 1e-6


def exact(total, weight):
    wide = total.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPSILON) * weight


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16], ids=str)
@pytest.mark.parametrize("has_rows", [0, 1])
@pytest.mark.parametrize("has_residual", [0, 1])
def test_norm_of_the_rounded_sum(run_op, rng, dtype, has_residual, has_rows):
    x, residual = (rng.standard_normal((5, 32)).astype(dtype) for _ in range(2))
    weight = rng.standard_normal(32).astype(np.float32)
    rows = np.array([4, 0, 4], np.int32)
    inputs = [x, *[residual] * has_residual, weight, *[rows] * has_rows]
    fields = {"has_residual": has_residual, "has_rows": has_rows, "epsilon": EPSILON}
    outputs = 1 + (has_residual and not has_rows)
    normed, *rest = run_op("M3AddRmsNorm", *inputs, outputs=outputs, **fields)
    total = (x.astype(np.float32) + residual.astype(np.float32)).astype(dtype)
    total = total if has_residual else x
    want = exact(total[rows] if has_rows else total, weight)
    assert normed.dtype == dtype
    assert normed.shape == want.shape
    rounding = 2**-8 if dtype == BF16 else 1e-6
    assert np.all(np.abs(normed.astype(np.float64) - want) <= rounding * np.abs(want) + 1e-6)
    assert all(x.tobytes() == total.tobytes() for x in rest)


def test_inputs_are_counted(run_op):
    x, weight = np.ones((1, 8), np.float32), np.ones(8, np.float32)
    with pytest.raises(ValueError, match="has_residual 1 and has_rows 0, found 2 inputs"):
        run_op("M3AddRmsNorm", x, weight, has_residual=1, has_rows=0, epsilon=EPSILON)


def test_embedding(run_op, rng):
    words, table = (rng.standard_normal((n, 6)).astype(BF16) for n in (9, 3))
    ids = np.array([8, 9, 11, 0], np.int32)
    (out,) = run_op("M3Embedding", ids, words, table, vocab_size=9)
    assert out.tobytes() == np.concatenate([words, table])[ids].tobytes()
    with pytest.raises(ValueError, match="vocab_size 10, found words"):
        run_op("M3Embedding", ids, words, table, vocab_size=10)


def test_embedding_with_an_empty_table(run_op, rng):
    words, table = rng.standard_normal((9, 6)).astype(BF16), np.zeros((0, 6), BF16)
    ids = np.array([8, 0], np.int32)
    (out,) = run_op("M3Embedding", ids, words, table, vocab_size=9)
    assert out.tobytes() == words[ids].tobytes()
    (out,) = run_op("M3Embedding", ids[:0], words, table, vocab_size=9)
    assert out.shape == (0, 6)


@pytest.mark.parametrize("wrong", [-1, 12])
def test_embedding_of_ids_that_nobody_has(run_op, wrong):
    words, table = np.zeros((9, 6), BF16), np.zeros((3, 6), BF16)
    with pytest.raises(ValueError, match=r"ids span .*, expected 0 to 11"):
        run_op("M3Embedding", np.array([4, wrong], np.int32), words, table, vocab_size=9)
