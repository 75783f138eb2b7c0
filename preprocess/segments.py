"""Which patch rows see each other in the vision tower, and where each of them lies.

A segment is a picture, or up to `max_frames` temporal patches of a video: the tower attends inside
it and counts time from its start.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Grid = tuple[int, int, int]
"""Patches of a picture or video: time, rows, columns."""


def cut_segments(grids: Iterable[Grid], max_frames: int) -> list[Grid]:
    """The grids of the segments, in order: a video is cut behind every `max_frames` patches."""
    return [
        (min(max_frames, frames - first), height, width)
        for frames, height, width in grids
        for first in range(0, frames, max_frames)
    ]


def segment_offsets(segments: Iterable[Grid]) -> npt.NDArray[np.int32]:
    """int32 [segments + 1]: the first row of each segment, and the end of the last."""
    rows = (frames * height * width for frames, height, width in segments)
    return np.array([0, *itertools.accumulate(rows)], np.int32)


def patch_positions(segments: Sequence[Grid], merge: int) -> npt.NDArray[np.int32]:
    """int32 [rows, 3]: time, row and column of every patch, each frame in merge-block order."""
    return np.concatenate([_positions(segment, merge) for segment in segments])


def _positions(segment: Grid, merge: int) -> npt.NDArray[np.int32]:
    frames, height, width = segment
    indices = np.indices(segment, dtype=np.int32)
    blocks = indices.reshape(3, frames, height // merge, merge, width // merge, merge)
    return blocks.transpose(1, 2, 4, 3, 5, 0).reshape(-1, 3)
