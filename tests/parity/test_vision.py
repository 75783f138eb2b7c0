"""Image features, and logits of prompts with images, against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.full

GRIDS = ((1, 4, 6), (1, 2, 2), (1, 8, 4))
MERGE = 2
IMAGE_TOKEN = 500


def positions_of(grid):
    """(t, h, w) of every patch row: the rows of one frame come in 2x2 groups."""
    frames, height, width = grid
    return np.array(
        [
            (t, y + dy, x + dx)
            for t in range(frames)
            for y in range(0, height, MERGE)
            for x in range(0, width, MERGE)
            for dy in range(MERGE)
            for dx in range(MERGE)
        ],
        np.int32,
    )


@pytest.fixture(scope="module")
def pixels():
    """Random patches of three images."""
    rows = sum(t * h * w for t, h, w in GRIDS)
    return np.random.default_rng(3).standard_normal((rows, 3 * 2 * 14 * 14)).astype(np.float32)


@pytest.fixture(scope="module")
def prompt(token_ids):
    """Text and the images' placeholders in turn."""
    pieces = [token_ids(15)]
    for t, h, w in GRIDS:
        pieces += [np.full(t * h * w // MERGE**2, IMAGE_TOKEN), token_ids(10 + h)]
    return np.concatenate(pieces).astype(np.int32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("geometry", ["small", "real-blocks"])
def test_features_and_logits(oracle, driver, vision, within, pixels, prompt, geometry, dtype):
    images = {"pixel_values": torch.tensor(pixels), "image_grid_thw": torch.tensor(GRIDS)}
    exact = oracle(geometry, "float64").forward(prompt, **images)
    theirs = oracle(geometry, dtype).forward(prompt, **images)

    segments = np.cumsum([0, *(t * h * w for t, h, w in GRIDS)]).astype(np.int32)
    positions = np.concatenate([positions_of(grid) for grid in GRIDS])
    features = vision(geometry, dtype)(pixels, positions, segments)
    within("features", features, theirs.features, exact.features)

    ours = driver(geometry, dtype, table=features)
    rows = prompt == IMAGE_TOKEN
    ids = prompt.copy()
    ids[rows] = ours.engine.config.vocab_size + np.arange(rows.sum())
    within("logits", ours.run(ids, chunk=20), theirs.logits, exact.logits)
