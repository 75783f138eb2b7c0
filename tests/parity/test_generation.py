"""Greedy continuations against transformers' generate."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.full

COUNT = 32


@pytest.mark.parametrize(
    ("geometry", "length"),
    [
        pytest.param("small", 20, id="small"),
        pytest.param("real-blocks", 2035, id="real-blocks-across-2048"),
    ],
)
def test_greedy_tokens(oracle, driver, sequence, token_ids, geometry, length):
    prompt = token_ids(length)
    want = oracle(geometry, "float32").generate(prompt, COUNT)
    ids = np.concatenate([prompt, np.zeros(COUNT, np.int32)])
    ours = sequence(driver(geometry, "float32"), ids)
    logits = ours.context(length)
    for position in range(length, length + COUNT):
        ids[position] = logits[-1].argmax()
        logits = ours.decode()
    assert ids[length:].tolist() == want
