"""Logits and selections of whole sequences against transformers."""

from __future__ import annotations

import numpy as np
import pytest
from m3trt.runtime.reference.block_select import M3BlockSelect

pytestmark = pytest.mark.full

CASES = [
    pytest.param("small", 203, id="small"),
    pytest.param("real-blocks", 2309, id="real-blocks-beyond-2048"),
]


def cosine(a, b):
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("geometry", "length"), CASES)
def test_logits(oracle, driver, token_ids, record_property, geometry, length, dtype):
    ids = token_ids(length)
    exact = oracle(geometry, "float64").logits(ids)
    theirs = np.abs(oracle(geometry, dtype).logits(ids) - exact)
    logits = driver(geometry, dtype).run(ids)
    ours = np.abs(logits - exact)
    print(dtype, "max", ours.max(), theirs.max(), "mean", ours.mean(), theirs.mean(), cosine(logits,exact), np.abs(exact).max())
    assert ours.max() <= 2 * theirs.max()
    assert ours.mean() <= 2 * theirs.mean()


@pytest.mark.parametrize(("geometry", "length"), CASES)
def test_block_ids(oracle, driver, token_ids, monkeypatch, geometry, length):
    ids = token_ids(length)
    selections = []
    run = M3BlockSelect._run

    def recording(self, *inputs, **attributes):
        (block_ids,) = run(self, *inputs, **attributes)
        selections.append(block_ids)
        return (block_ids,)

    monkeypatch.setattr(M3BlockSelect, "_run", recording)
    driver(geometry, "float32").run(ids)
    exact = oracle(geometry, "float64").forward(ids)
    assert len(selections) == len(exact.block_ids) == 3
    differing = 0
    for ours, theirs, scores in zip(
        selections, exact.block_ids, exact.block_scores, strict=True
    ):
        blocks = scores.shape[-1]
        mine, other = (
            (block_ids[..., None] == np.arange(blocks)).any(axis=-2)
            for block_ids in (ours, theirs)
        )
        assert np.array_equal(mine.sum(-1), other.sum(-1))
        last = np.where(other & np.isfinite(scores), scores, np.inf).min(-1, keepdims=True)
        disputed = mine != other
        differing += disputed.any(-1).sum()
        assert np.all(np.abs(scores - last)[disputed] < 1e-4)
    print("rows that differ inside the band:", differing)
