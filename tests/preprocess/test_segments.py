"""Segments and positions of pictures and videos, by hand and against transformers'."""

from __future__ import annotations

import numpy as np
import pytest
from m3trt.preprocess.segments import Grid, cut_segments, patch_positions, segment_offsets

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize(
    ("grids", "expected"),
    [
        pytest.param([(1, 4, 6)], [(1, 4, 6)], id="picture"),
        pytest.param([(4, 2, 2)], [(4, 2, 2)], id="short"),
        pytest.param([(8, 2, 4)], [(4, 2, 4), (4, 2, 4)], id="even"),
        pytest.param([(9, 2, 4)], [(4, 2, 4), (4, 2, 4), (1, 2, 4)], id="rest"),
        pytest.param(
            [(1, 4, 6), (5, 2, 2), (1, 2, 2)],
            [(1, 4, 6), (4, 2, 2), (1, 2, 2), (1, 2, 2)],
            id="mixed",
        ),
    ],
)
def test_a_video_is_cut(grids: list[Grid], expected: list[Grid]) -> None:
    assert cut_segments(grids, 4) == expected


def test_offsets() -> None:
    offsets = segment_offsets([(1, 4, 6), (4, 2, 2), (1, 2, 2)])
    assert offsets.dtype == np.int32
    assert offsets.tolist() == [0, 24, 40, 44]


def test_positions_of_two_frames() -> None:
    """Frame by frame, in each the blocks of 2x2 row by row."""
    found = patch_positions([(2, 2, 4)], 2)
    assert found.dtype == np.int32
    frame = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert found.tolist() == [[t, *at] for t in range(2) for at in frame]


@pytest.mark.full
@pytest.mark.parametrize("frames", [1, 2, 7, 8, 9, 16, 17])
def test_equal_to_transformers(importable_torchvision: None, frames: int) -> None:
    """Its video processor cuts, its tower attends and turns inside each row of the cut grid."""
    import torch
    from transformers.models.minimax_m3_vl.video_processing_minimax_m3_vl import (
        MiniMaxM3VLVideoProcessor,
    )
    from transformers.vision_utils import get_vision_attention_seqlens, get_vision_position_ids

    video = torch.zeros(frames, 3, 56, 84, dtype=torch.uint8)
    found = MiniMaxM3VLVideoProcessor()(videos=[video], return_tensors="pt", do_resize=False)
    grid = found["video_grid_thw"]
    segments = cut_segments([(-(-frames // 2), 4, 6)], 4)
    assert segments == [tuple(row) for row in grid.tolist()]
    positions = get_vision_position_ids(grid, 2, include_temporal=True)
    np.testing.assert_array_equal(patch_positions(segments, 2), positions.numpy())
    config = type("Config", (), {"_attn_implementation": "eager"})()
    ends, _ = get_vision_attention_seqlens(grid, config, merge_temporal=True)
    np.testing.assert_array_equal(segment_offsets(segments), ends.numpy())
