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

BAND = 1e-4
"""Scores closer than this are a tie in float32; they reach 200."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("geometry", "length"), CASES)
def test_logits(oracle, driver, token_ids, within, geometry, length, dtype):
    ids = token_ids(length)
    exact = oracle(geometry, "float64").forward(ids)
    theirs = oracle(geometry, dtype).forward(ids)
    within("logits", driver(geometry, dtype).run(ids), theirs.logits, exact.logits)


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
    for ours, theirs, scores in zip(selections, exact.block_ids, exact.block_scores, strict=True):
        blocks = np.arange(scores.shape[-1])
        mine, other = (
            (block_ids[..., None] == blocks).any(axis=-2) for block_ids in (ours, theirs)
        )
        assert np.array_equal(mine.sum(axis=-1), other.sum(axis=-1))
        worst_taken = np.where(other, scores, np.inf).min(axis=-1, keepdims=True)
        near_the_cut = np.abs(np.nan_to_num(scores, neginf=-1e9, posinf=1e9) - worst_taken) < BAND
        assert near_the_cut[mine != other].all()
        selective = other.sum(axis=-1) < np.isfinite(scores).sum(axis=-1)
        assert selective.any(), "the sequence is too short for selection to matter"
