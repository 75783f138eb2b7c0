from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

pytestmark = pytest.mark.smoke

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
HI, D = 2, 8


def selected(step, index_q, cache, top_k, init_blocks, local_blocks):
    """The rule of the op, one query at a time."""
    ids = np.full((HI, step.tokens, top_k), -1)
    for token, request, position in step.rows():
        own = position // step.block
        for head in range(HI):
            ranking = []
            for block in range(own + 1):
                last = min((block + 1) * step.block, position + 1)
                dots = [
                    float(index_q[token, head].astype(np.float64) @ cache[step.slot(request, j)])
                    for j in range(block * step.block, last)
                ]
                forced = block < init_blocks or block > own - local_blocks
                best = max((d for d in dots if not np.isnan(d)), default=-np.inf)
                ranking.append((block != own, not forced, -best, block))
            chosen = sorted(entry[-1] for entry in sorted(ranking)[:top_k])
            ids[head, token, : len(chosen)] = chosen
    return ids


@pytest.fixture
def select(run_op, step):
    """select(index_q, cache, *scale, **attributes) -> block ids; M3's attributes by default."""

    def run(index_q, cache, *scale, **attributes):
        limits = {"top_k": 3, "init_blocks": 0, "local_blocks": 1} | attributes
        inputs = (index_q, cache, *step.batch, step.decode_rows, *scale)
        return run_op("M3BlockSelect", *inputs, block_size=step.block, **limits)[0]

    return run


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16, FP8], ids=str)
@pytest.mark.parametrize(
    ("top_k", "init_blocks", "local_blocks"),
    [
        pytest.param(3, 0, 1, id="m3"),
        pytest.param(2, 1, 1, id="init"),
        pytest.param(3, 1, 2, id="init-and-local"),
        pytest.param(1, 1, 1, id="only-own"),
        pytest.param(16, 0, 1, id="more-than-there-are"),
    ],
)
def test_against_loops(select, step, rng, dtype, top_k, init_blocks, local_blocks):
    model_dtype = BF16 if dtype == FP8 else dtype
    index_q = rng.standard_normal((step.tokens, HI, D)).astype(model_dtype)
    cache = step.fill(np.empty((step.pages, step.block, D), dtype), 1, rng)
    scale = [np.array([0.5], np.float32)] if dtype == FP8 else []
    limits = {"top_k": top_k, "init_blocks": init_blocks, "local_blocks": local_blocks}
    ids = select(index_q, cache, *scale, **limits)
    exact = cache.astype(np.float64)
    assert ids.dtype == np.int32
    assert np.array_equal(ids, selected(step, index_q, exact, top_k, init_blocks, local_blocks))


def test_ties_go_to_the_lower_id_and_nan_loses(select, step, rng):
    index_q = np.ones((step.tokens, HI, D), np.float32)
    cache = step.fill(np.empty((step.pages, step.block, D), np.float32), 1, rng)
    request, position = 1, 16
    for j in range(position + 1):
        cache[step.slot(request, j)] = 1
    for j in range(4):
        cache[step.slot(request, j)] = np.nan
    ids = select(index_q, cache)
    last = step.cu_query_lens[request + 1] - 1
    assert ids[:, last].tolist() == [[1, 2, 4]] * HI


def test_pages_that_are_not_blocks_are_refused(select, step):
    cache = np.zeros((step.pages, 2 * step.block, D), np.float32)
    index_q = np.zeros((step.tokens, HI, D), np.float32)
    with pytest.raises(ValueError, match="pages hold 8 tokens, blocks 4"):
        select(index_q, cache)
