"""What the checkpoint says about image preprocessing, checked against what is implemented."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3trt.convert.configuration import ConfigError, VisionConfig, check_number

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

RELEASED_SIZE = [672, 672]
"""What the release writes as `size`; its processor ignores it in favour of the bounds below."""

MIN_PIXELS = 3136
MAX_PIXELS = 451584
"""576 tokens with patches of 14 and 2x2 merging."""

RESCALE_FACTOR = 1 / 255
BICUBIC = 3


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """Constants of resizing, normalising and cutting into patches; sizes in pixels."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    segment_max_frames: int
    min_pixels: int = MIN_PIXELS
    max_pixels: int = MAX_PIXELS
    rescale_factor: float = RESCALE_FACTOR
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD

    @property
    def factor(self) -> int:
        """Sides of a resized picture are multiples of this."""
        return self.patch_size * self.merge_size

    @classmethod
    def load(cls, directory: Path, vision: VisionConfig) -> ImageSettings:
        """Read `directory/preprocessor_config.json`; without that file the released values hold.

        Raises:
            ConfigError: malformed, contradicts the vision tower, or asks for what is not
                implemented.
        """
        path = directory / "preprocessor_config.json"
        data: Any = {}
        if path.exists():
            try:
                data = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(f"{path}: {error}") from error
        try:
            return cls._from_json(data, vision)
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def _from_json(cls, data: dict[str, Any], vision: VisionConfig) -> ImageSettings:
        compression = data.get("img_token_compression_config", {})
        tower = {
            "patch_size": vision.patch_size,
            "merge_size": vision.spatial_merge_size,
            "spatial_merge_size": vision.spatial_merge_size,
            "temporal_patch_size": vision.temporal_patch_size,
        }
        for name, expected in tower.items():
            for found in (data.get(name, expected), compression.get(name, expected)):
                if found != expected:
                    raise ConfigError(f"{name} is {found}, the vision tower has {expected}")
        for flag in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if data.get(flag, True) is not True:
                raise ConfigError(f"{flag} is {data[flag]}, only true is supported")
        if data.get("resample", BICUBIC) != BICUBIC:
            raise ConfigError(f"resample is {data['resample']}, only {BICUBIC} (bicubic) is")
        low, high = _pixel_bounds(data)
        return cls(
            patch_size=vision.patch_size,
            merge_size=vision.spatial_merge_size,
            temporal_patch_size=vision.temporal_patch_size,
            segment_max_frames=vision.segment_max_frames,
            min_pixels=low,
            max_pixels=high,
            rescale_factor=_number(data.get("rescale_factor", RESCALE_FACTOR), "rescale_factor"),
            mean=_channels(data.get("image_mean", CLIP_MEAN), "image_mean"),
            std=_channels(data.get("image_std", CLIP_STD), "image_std"),
        )


def _pixel_bounds(data: dict[str, Any]) -> tuple[int, int]:
    size = data.get("size")
    if size is None or size == RELEASED_SIZE:
        size = {}
    if not isinstance(size, dict) or size.keys() - {"shortest_edge", "longest_edge"}:
        raise ConfigError(
            f"size is {size}, expected {RELEASED_SIZE} or shortest_edge and longest_edge in pixels"
        )
    low = data.get("min_pixels") or size.get("shortest_edge") or MIN_PIXELS
    high = data.get("max_pixels") or size.get("longest_edge") or MAX_PIXELS
    if not 0 < low <= high:
        raise ConfigError(f"min_pixels {low} and max_pixels {high} are not a range")
    return int(low), int(high)


def _channels(values: Any, name: str) -> tuple[float, float, float]:
    if not isinstance(values, (list, tuple)) or len(values) != 3:
        raise ConfigError(f"{name} is {values}, expected three numbers")
    first, second, third = (_number(value, name) for value in values)
    return first, second, third


def _number(value: Any, name: str) -> float:
    check_number(name, value, float, allow_zero=name == "image_mean")
    return float(value)
