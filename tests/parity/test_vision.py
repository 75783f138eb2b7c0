"""Features of images and a video, and logits of prompts with them, against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from m3trt.preprocess.segments import cut_segments, patch_positions, segment_offsets

pytestmark = pytest.mark.full

GRIDS = ((1, 4, 6), (1, 2, 2), (6, 8, 4))
"""Two images and a video, in patches."""

CUT = ((1, 4, 6), (1, 2, 2), (4, 8, 4), (2, 8, 4))
"""As transformers' processor hands them to its tower."""

MERGE = 2
IMAGE_TOKEN = 500


@pytest.fixture(scope="module")
def pixels():
    """Random patches of all of them."""
    rows = sum(t * h * w for t, h, w in GRIDS)
    return np.random.default_rng(3).standard_normal((rows, 3 * 2 * 14 * 14)).astype(np.float32)


@pytest.fixture(scope="module")
def prompt(token_ids):
    """Text and the placeholders of images in turn; the video's are the same here."""
    pieces = [token_ids(15)]
    for t, h, w in GRIDS:
        pieces += [np.full(t * h * w // MERGE**2, IMAGE_TOKEN), token_ids(10 + h)]
    return np.concatenate(pieces).astype(np.int32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("geometry", ["small", "real-blocks"])
def test_features_and_logits(oracle, driver, vision, within, pixels, prompt, geometry, dtype):
    images = {"pixel_values": torch.tensor(pixels), "image_grid_thw": torch.tensor(CUT)}
    exact = oracle(geometry, "float64").forward(prompt, **images)
    theirs = oracle(geometry, dtype).forward(prompt, **images)

    segments = cut_segments(GRIDS, max_frames=4)
    inputs = pixels, patch_positions(segments, MERGE), segment_offsets(segments)
    features = vision(geometry, dtype)(*inputs)
    within("features", features, theirs.features, exact.features)

    ours = driver(geometry, dtype, table=features)
    rows = prompt == IMAGE_TOKEN
    ids = prompt.copy()
    ids[rows] = ours.engine.config.vocab_size + np.arange(rows.sum())
    within("logits", ours.run(ids, chunk=20), theirs.logits, exact.logits)
