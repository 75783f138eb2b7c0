"""Pictures to patch rows: decode, resize, normalise, cut; bit for bit what M3's processor does.

Only the bicubic resize comes from Pillow instead of torchvision, which differs by at most one
8-bit level when shrinking.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from m3trt.preprocess.errors import PreprocessError
from m3trt.preprocess.image_settings import ImageSettings
from m3trt.preprocess.segments import Grid, cut_segments, patch_positions, segment_offsets
from PIL import Image, ImageOps, UnidentifiedImageError

MAX_ASPECT_RATIO = 200
MAX_DECODED_PIXELS = 64_000_000
"""192 MB of RGB: above any camera in common use, below what a crafted file can claim."""

STRIP_ROWS = 512
"""Transparency is removed strip by strip: whole pictures would be in memory several times."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""Formats that Pillow reads by itself; others start external programs (EPS) or are exotic."""


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """The pictures of one request, N patch rows in all.

    patches [N, C * T * patch * patch] in the engine's dtype; positions int32 [N, 3], the patch
    indices (time, row, column); cu_seqlens int32 [segments + 1]; grids [pictures, 3] of patches
    (time, rows, columns); num_tokens per picture after merging. Rows are in merge-block order:
    each merge * merge consecutive ones become one token.
    """

    patches: npt.NDArray[Any]
    positions: npt.NDArray[np.int32]
    cu_seqlens: npt.NDArray[np.int32]
    grids: tuple[Grid, ...]
    num_tokens: tuple[int, ...]


def decode_image(content: bytes, max_pixels: int = MAX_DECODED_PIXELS) -> Image.Image:
    """The first frame of an encoded picture as upright RGB.

    Raises:
        PreprocessError: not a picture, truncated, or more than `max_pixels`.
    """
    Image.init()  # once; does nothing afterwards
    formats = [name for name in FORMATS if name in Image.OPEN]
    try:
        with Image.open(io.BytesIO(content), formats=formats) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise PreprocessError(
                    f"the picture has {width}x{height} pixels, at most {max_pixels} are allowed"
                )
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return to_rgb(image)
    except PreprocessError:
        raise
    except Image.DecompressionBombError as error:
        raise PreprocessError(
            f"the picture claims far more than {max_pixels} pixels, the most allowed"
        ) from error
    except UnidentifiedImageError as error:
        raise PreprocessError(
            f"not a picture: none of the formats {', '.join(formats)} fits its {len(content)} bytes"
        ) from error
    except Exception as error:  # hostile bytes make Pillow's decoders raise almost anything
        raise PreprocessError(f"the picture cannot be decoded: {error}") from error


def image_from_pixels(pixels: npt.NDArray[Any]) -> Image.Image:
    """RGB picture of raw pixels uint8 [height, width, 1, 3 or 4 channels].

    Raises:
        PreprocessError: another shape or dtype.
    """
    shape = pixels.shape
    if pixels.dtype != np.uint8 or len(shape) != 3 or shape[2] not in (1, 3, 4) or 0 in shape:
        raise PreprocessError(
            f"raw pixels are {pixels.dtype} {list(shape)}, expected uint8 [height, width, channels]"
            " with 1, 3 or 4 channels"
        )
    plane = pixels[:, :, 0] if shape[2] == 1 else pixels
    return to_rgb(Image.fromarray(np.ascontiguousarray(plane)))


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB of any mode: the upper 8 of 16 bits, a white ground under transparent pixels.

    Raises:
        PreprocessError: pixels are floats or wider than 16 bits.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        return _upper_bits(image).convert("RGB")
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    out = Image.new("RGB", image.size)
    for top in range(0, image.height, STRIP_ROWS):
        box = (0, top, image.width, min(top + STRIP_ROWS, image.height))
        strip = image.crop(box).convert("RGBA")
        ground = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        out.paste(Image.alpha_composite(ground, strip).convert("RGB"), box)
    return out


def _upper_bits(image: Image.Image) -> Image.Image:
    """Pillow's own conversion would clip: all but the darkest 16-bit values became white."""
    values = np.asarray(image)
    low, high = values.min(), values.max()
    if image.mode == "F" or low < 0 or high >= 1 << 16:
        raise PreprocessError(
            f"the picture has {values.dtype} pixels from {low} to {high}, expected integers of at"
            " most 16 bits: convert it to 8 bits"
        )
    return Image.fromarray((values >> 8).astype(np.uint8))


def smart_resize(height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    """The (height, width) to resize to: multiples of the factor, area within the bounds.

    Raises:
        PreprocessError: one side is more than 200 times the other.
    """
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise PreprocessError(
            f"the picture is {width}x{height}: one side is {ratio:.1f} times the other, at most"
            f" {MAX_ASPECT_RATIO} is allowed"
        )
    factor = settings.factor
    # round() is banker's rounding here, as in the reference.
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > settings.max_pixels:
        beta = math.sqrt((height * width) / settings.max_pixels)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif new_height * new_width < settings.min_pixels:
        beta = math.sqrt(settings.min_pixels / (height * width))
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    return new_height, new_width


class ImageProcessor:
    """Resized, normalised patch rows of pictures; safe to use from several threads."""

    def __init__(self, settings: ImageSettings, dtype: str) -> None:
        """
        Args:
            settings: the checkpoint's constants.
            dtype: "bfloat16" or "float32", the engine's.
        """
        self.settings = settings
        self._dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
        self._levels = _normalised_levels(settings).astype(self._dtype)

    def resize(self, image: Image.Image) -> Image.Image:
        """RGB `image` at the size that `smart_resize` gives, bicubic with antialiasing.

        Raises:
            PreprocessError: the picture is too thin.
        """
        height, width = smart_resize(image.height, image.width, self.settings)
        if (width, height) == image.size:
            return image
        return image.resize((width, height), Image.Resampling.BICUBIC)

    def num_tokens(self, image: Image.Image) -> int:
        """How many tokens a resized picture becomes."""
        factor = self.settings.factor
        return (image.height // factor) * (image.width // factor)

    def patchify(self, images: Sequence[Image.Image]) -> ImageBatch:
        """Patch rows of resized RGB `images`, at least one."""
        patch, merge = self.settings.patch_size, self.settings.merge_size
        grids = tuple((1, image.height // patch, image.width // patch) for image in images)
        segments = cut_segments(grids, self.settings.segment_max_frames)
        return ImageBatch(
            patches=np.concatenate([self._patches(image) for image in images]),
            positions=patch_positions(segments, merge),
            cu_seqlens=segment_offsets(segments),
            grids=grids,
            num_tokens=tuple(self.num_tokens(image) for image in images),
        )

    def _patches(self, image: Image.Image) -> npt.NDArray[Any]:
        """[rows, C * T * patch * patch] of one picture; its frame fills all T time slots."""
        patch, merge = self.settings.patch_size, self.settings.merge_size
        frames = self.settings.temporal_patch_size
        pixels = np.asarray(image)
        tall, wide = pixels.shape[0] // (patch * merge), pixels.shape[1] // (patch * merge)
        blocks = pixels.reshape(tall, merge, patch, wide, merge, patch, 3)
        blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5)  # block y, x, then y, x in it, then C
        out = np.empty((tall, wide, merge, merge, 3, frames, patch, patch), self._dtype)
        for channel in range(3):
            values = self._levels[channel][blocks[..., channel, :, :]]
            out[..., channel, :, :, :] = values[..., None, :, :]
        return out.reshape(tall * wide * merge**2, -1)


def _normalised_levels(settings: ImageSettings) -> npt.NDArray[np.float32]:
    """The normalised value of each 8-bit level, [3, 256], in the reference's float32 steps."""
    scale = np.float32(1.0 / settings.rescale_factor)
    mean = np.array(settings.mean, np.float32)[:, None] * scale
    std = np.array(settings.std, np.float32)[:, None] * scale
    levels: npt.NDArray[np.float32] = (np.arange(256, dtype=np.float32) - mean) / std
    return levels
