"""How a sequence is cut into steps, and what runs beside it, changes nothing."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.full

TOLERANCE = 1e-4
"""Twice what float32 transformers is off from float64 on these sequences; logits reach 9."""


def differ_at_most(ours, want, tolerance=TOLERANCE):
    assert ours.shape == want.shape
    assert np.abs(ours - want).max() <= tolerance


@pytest.fixture(scope="module")
def whole(driver, token_ids):
    """whole(geometry, length) -> logits of one prefill, each made once."""
    made = {}

    def make(geometry, length):
        if (geometry, length) not in made:
            made[geometry, length] = driver(geometry, "float32").run(token_ids(length))
        return made[geometry, length]

    return make


@pytest.mark.parametrize(
    ("geometry", "length", "chunk"),
    [("small", 203, chunk) for chunk in (1, 7, 8, 9)]
    + [("real-blocks", 2309, chunk) for chunk in (127, 128, 129, 1000)],
)
def test_prefill_in_chunks(driver, token_ids, whole, geometry, length, chunk):
    differ_at_most(
        driver(geometry, "float32").run(token_ids(length), chunk), whole(geometry, length)
    )


@pytest.mark.parametrize("path", ["context", "decode"])
@pytest.mark.parametrize(
    ("geometry", "length", "single"), [("small", 203, 190), ("real-blocks", 2309, 300)]
)
def test_single_steps(driver, sequence, token_ids, whole, geometry, length, single, path):
    """Over the last positions, which cross the point from which selection leaves blocks out."""
    ours = sequence(driver(geometry, "float32"), token_ids(length))
    ours.context(length - single)
    step = ours.decode if path == "decode" else lambda: ours.context(1)
    rows = [step() for _ in range(single)]
    differ_at_most(np.concatenate(rows), whole(geometry, length)[-single:])


@pytest.mark.parametrize(
    ("geometry", "lengths", "new"),
    [
        pytest.param("small", (100, 9, 1, 33, 203), (37, 9, 1, 1, 1), id="small"),
        pytest.param(
            "real-blocks", (2309, 129, 128, 300, 2200), (200, 129, 1, 1, 1), id="real-blocks"
        ),
    ],
)
def test_a_request_among_others(driver, sequence, token_ids, whole, geometry, lengths, new):
    """Three context requests, two decode rows, one padded decode row and padding tokens."""
    batch = driver(geometry, "float32")
    requests = [sequence(batch, token_ids(length)) for length in lengths]
    for request, length, last in zip(requests, lengths, new, strict=True):
        if length > last:
            request.context(length - last)
    parts = [request.take(last) for request, last in zip(requests, new, strict=True)]
    logits = batch.step(parts, decode=2, padding=5, padded_rows=1)
    for ours, length in zip(logits, lengths, strict=True):
        differ_at_most(ours, whole(geometry, length)[-len(ours) :])
