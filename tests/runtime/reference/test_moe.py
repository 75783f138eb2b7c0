from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

pytestmark = pytest.mark.smoke

BF16 = np.dtype(ml_dtypes.bfloat16)
EXPERTS, HIDDEN, WIDTH, SHARED, TOP_K = 8, 12, 5, 7, 3
SCALING, ALPHA, LIMIT = 2.0, 1.702, 7.0
ATTRIBUTES = {
    "top_k": TOP_K,
    "routed_scaling_factor": SCALING,
    "swiglu_alpha": ALPHA,
    "swiglu_limit": LIMIT,
}


def mlp(x, fc, proj, dtype):
    both = fc @ x
    gate, up = np.minimum(both[: len(both) // 2], LIMIT), both[len(both) // 2 :]
    active = gate / (1 + np.exp(-ALPHA * gate)) * (np.clip(up, -LIMIT, LIMIT) + 1)
    return proj @ active.astype(np.float32).astype(dtype).astype(np.float64)


def exact(x, router, bias, fc, proj, shared_fc, shared_proj, dtype):
    out = np.zeros(x.shape)
    for i, row in enumerate(x.astype(np.float64)):
        p = 1 / (1 + np.exp(-(router.astype(np.float64) @ row)))
        chosen = sorted(range(EXPERTS), key=lambda e: (-(p[e] + bias[e]), e))[:TOP_K]
        total = sum(p[e] for e in chosen)
        for e in chosen:
            out[i] += SCALING * p[e] / total * mlp(row, fc[e], proj[e], dtype)
        out[i] += mlp(row, shared_fc, shared_proj, dtype)
    return out


@pytest.fixture
def weights(rng):
    def make(dtype):
        shapes = [
            (EXPERTS, 2 * WIDTH, HIDDEN),
            (EXPERTS, HIDDEN, WIDTH),
            (2 * SHARED, HIDDEN),
            (HIDDEN, SHARED),
        ]
        router = rng.standard_normal((EXPERTS, HIDDEN)).astype(np.float32) * 0.5
        bias = rng.standard_normal(EXPERTS).astype(np.float32) * 0.3
        return router, bias, *(rng.standard_normal(s).astype(dtype) * dtype.type(2) for s in shapes)

    return make


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16], ids=str)
@pytest.mark.parametrize("parts", [1, 4])
def test_against_loops(run_op, rng, weights, dtype, parts):
    router, bias, fc, proj, shared_fc, shared_proj = weights(dtype)
    x = rng.standard_normal((20, HIDDEN)).astype(dtype) * dtype.type(2)
    x[17:] = np.nan
    cu_query_lens = np.array([0, 4, 17, 17], np.int32)
    y = run_op(
        "M3MoE",
        *(x, cu_query_lens, router, bias),
        *np.split(fc, parts),
        *np.split(proj, parts),
        *(shared_fc, shared_proj),
        expert_parts=parts,
        **ATTRIBUTES,
    )[0]
    wide = (w.astype(np.float64) for w in (fc, proj, shared_fc, shared_proj))
    want = exact(x[:17], router, bias, *wide, dtype)
    assert y.dtype == dtype
    assert not y[17:].any(), "padding rows are zero"
    # the clamps of the activation bind in this data, and its rounding may fall the other way
    slack = 2**-8 if dtype == BF16 else 1e-6
    assert np.all(np.abs(y[:17].astype(np.float64) - want) <= slack * np.abs(want).max())


def test_equal_scores_go_to_the_lower_expert(run_op, weights):
    router, bias, fc, proj, shared_fc, shared_proj = weights(np.dtype(np.float32))
    x, cu_query_lens = np.ones((1, HIDDEN), np.float32), np.array([0, 1], np.int32)

    def run(router, bias, fc, proj):
        inputs = (x, cu_query_lens, router, bias, fc, proj, shared_fc, shared_proj)
        return run_op("M3MoE", *inputs, expert_parts=1, **ATTRIBUTES)[0]

    tied = run(np.zeros_like(router), np.zeros_like(bias), fc, proj)
    forced = np.where(np.arange(EXPERTS) < TOP_K, 1, 0).astype(np.float32)
    assert np.array_equal(tied, run(np.zeros_like(router), forced, fc, proj))


def test_no_tokens(run_op, weights):
    x, cu_query_lens = np.empty((0, HIDDEN), BF16), np.array([0, 0], np.int32)
    y = run_op("M3MoE", x, cu_query_lens, *weights(BF16), expert_parts=1, **ATTRIBUTES)[0]
    assert y.shape == (0, HIDDEN)
