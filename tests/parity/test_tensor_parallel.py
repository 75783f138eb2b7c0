"""Ranks in threads give the logits of one rank."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.full


@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_logits_equal_one_rank(driver, token_ids, tp_size):
    """Eight query and four KV heads, so that KV heads are split, single, and replicated."""
    ids = token_ids(203)
    one = driver("parallel", "float32").run(ids, chunk=64, decode=20)
    ranks = driver("parallel", "float32", tp_size)
    several = ranks.run(ids, chunk=64, decode=20)
    ranks.close()
    assert np.abs(several - one).max() <= 1e-4


def test_eight_ranks_against_transformers(oracle, driver, token_ids, within):
    ids = token_ids(203)
    exact = oracle("parallel", "float64").forward(ids)
    theirs = oracle("parallel", "bfloat16").forward(ids)
    ranks = driver("parallel", "bfloat16", 8)
    logits = ranks.run(ids)
    ranks.close()
    within("logits", logits, theirs.logits, exact.logits)
