"""Pictures against transformers' own image processor."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from m3trt.preprocess.errors import PreprocessError
from m3trt.preprocess.image import (
    ImageBatch,
    ImageProcessor,
    decode_image,
    image_from_pixels,
    smart_resize,
    to_rgb,
)
from m3trt.preprocess.image_settings import ImageSettings
from PIL import Image

SETTINGS = ImageSettings(patch_size=14, merge_size=2, temporal_patch_size=2, segment_max_frames=4)
PROCESSOR = ImageProcessor(SETTINGS, "float32")

pytestmark = pytest.mark.smoke


def process(*images: Image.Image) -> ImageBatch:
    return PROCESSOR.patchify([PROCESSOR.resize(image) for image in images])


def noise(height: int, width: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    channels = {"L": 1, "P": 3, "RGB": 3, "RGBA": 4, "LA": 2, "CMYK": 4, "1": 1}[mode]
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (height, width, channels), np.uint8)
    if mode == "P":
        return Image.fromarray(pixels).quantize(32)
    if mode == "1":
        return Image.fromarray(pixels[:, :, 0]).convert("1")
    return Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels, mode=mode)


@pytest.mark.parametrize(
    ("height", "width", "expected", "tokens"),
    [
        (672, 672, (672, 672), 576),
        (1080, 1920, (504, 896), 576),
        (720, 1280, (504, 896), 576),
        (480, 640, (476, 644), 391),
        (600, 800, (560, 756), 540),
        (2016, 2016, (672, 672), 576),
        (4000, 3000, (756, 560), 540),
        (97, 131, (84, 140), 15),
        (28, 28, (56, 56), 4),
        (14, 14, (56, 56), 4),
        (42, 42, (56, 56), 4),
        (70, 70, (56, 56), 4),
        (1, 1, (56, 56), 4),
        (10, 1000, (28, 560), 20),
        (13, 300, (28, 280), 10),
    ],
)
def test_known_sizes(height: int, width: int, expected: tuple[int, int], tokens: int) -> None:
    assert smart_resize(height, width, SETTINGS) == expected
    batch = process(Image.new("RGB", (width, height)))
    assert batch.num_tokens == (tokens,)
    assert batch.patches.shape == (4 * tokens, 1176)


@pytest.mark.full
def test_sizes_equal_reference(reference: SimpleNamespace) -> None:
    rng = np.random.default_rng(1)
    sizes = [(int(h), int(w)) for h, w in np.exp(rng.uniform(0, 9, (4000, 2))).astype(int)]
    sizes += [(h, w) for h in range(1, 120) for w in (1, 13, 14, 42, 70, 98, 126, 154)]
    checked = 0
    for height, width in sizes:
        if max(height, width) / min(height, width) > 200:
            with pytest.raises(ValueError, match="aspect ratio"):
                reference.smart_resize(height, width)
            with pytest.raises(PreprocessError, match="at most 200"):
                smart_resize(height, width, SETTINGS)
            continue
        expected = reference.smart_resize(height, width, 28, 3136, 451584)
        assert smart_resize(height, width, SETTINGS) == expected
        checked += 1
    assert checked > 3000


def test_aspect_limit_is_inclusive() -> None:
    assert smart_resize(1, 200, SETTINGS)
    with pytest.raises(PreprocessError, match=r"201x1: one side is 201\.0 times the other"):
        process(Image.new("RGB", (201, 1)))


PICTURES = [
    pytest.param(noise(300, 417), id="rgb"),
    pytest.param(noise(300, 417, "RGBA"), id="rgba"),
    pytest.param(noise(100, 90, "LA"), id="la"),
    pytest.param(noise(300, 417, "L"), id="l"),
    pytest.param(noise(64, 65, "1"), id="1-bit"),
    pytest.param(noise(300, 417, "P"), id="p"),
    pytest.param(noise(300, 417, "CMYK"), id="cmyk"),
    pytest.param(noise(1, 1), id="1x1"),
    pytest.param(noise(1, 200), id="1-to-200"),
    pytest.param(noise(1400, 7), id="200-to-1"),
    pytest.param(noise(500, 900), id="shrunk"),
    pytest.param(noise(1800, 2600), id="huge"),
]


@pytest.mark.full
@pytest.mark.parametrize("image", PICTURES)
def test_patches_equal_reference(
    reference: SimpleNamespace, encode: Any, image: Image.Image
) -> None:
    """Grids of the picture itself; values after the same resize."""
    content = encode(image, "JPEG" if image.mode == "CMYK" else "PNG")
    ours = decode_image(content)
    original = Image.open(io.BytesIO(content))
    whole = reference.image_processor(original, return_tensors="np")
    batch = process(ours)
    np.testing.assert_array_equal(batch.grids, whole["image_grid_thw"])

    resized = PROCESSOR.resize(ours)
    expected = reference.image_processor(resized, do_resize=False, return_tensors="np")
    np.testing.assert_allclose(batch.patches, expected["pixel_values"], rtol=0, atol=1e-6)

    level = 1 / 255 / min(SETTINGS.std)
    shrunk = resized.height <= ours.height and resized.width <= ours.width
    if shrunk:
        assert np.abs(batch.patches - whole["pixel_values"]).max() <= level * 1.001


@pytest.mark.full
def test_exact_without_resize(reference: SimpleNamespace) -> None:
    image = noise(56, 84, seed=5)
    expected = reference.image_processor(image, return_tensors="np")
    batch = process(image)
    np.testing.assert_allclose(batch.patches, expected["pixel_values"], rtol=0, atol=1e-6)


@pytest.mark.full
def test_bfloat16_rounds_once(reference: SimpleNamespace) -> None:
    import torch

    image = noise(56, 84, seed=6)
    expected = reference.image_processor(image, return_tensors="pt")["pixel_values"]
    patches = ImageProcessor(SETTINGS, "bfloat16").patchify([image]).patches
    np.testing.assert_array_equal(
        patches.astype(np.float32), expected.to(torch.bfloat16).float().numpy()
    )


@pytest.mark.full
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation(reference: SimpleNamespace, encode: Any, orientation: int) -> None:
    """Encoded pictures are turned upright, as the reference does with those that it loads."""
    from transformers.image_utils import load_image

    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encode(noise(60, 120), "JPEG", exif=exif)
    encoded = "data:image/jpeg;base64," + base64.b64encode(content).decode()
    ours, theirs = decode_image(content), load_image(encoded)
    assert ours.size == ((120, 60) if orientation < 5 else (60, 120))
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_several_pictures() -> None:
    images = [noise(56, 84), noise(112, 56)]
    batch = process(*images)
    assert batch.grids == ((1, 4, 6), (1, 8, 4))
    assert batch.num_tokens == (6, 8)
    assert batch.cu_seqlens.dtype == np.int32
    np.testing.assert_array_equal(batch.cu_seqlens, [0, 24, 56])
    for image, start, stop in ((images[0], 0, 24), (images[1], 24, 56)):
        single = process(image)
        np.testing.assert_array_equal(batch.patches[start:stop], single.patches)
        np.testing.assert_array_equal(batch.positions[start:stop], single.positions)


def test_rows_are_where_positions_say() -> None:
    """Each row holds the pixels of its patch, channel by channel, the frame twice."""
    image = noise(56, 84)
    batch = process(image)
    assert batch.positions.dtype == np.int32
    pixels = np.asarray(image).astype(np.float64) / 255
    normalised = (pixels - SETTINGS.mean) / np.array(SETTINGS.std)
    seen = set()
    for row, (time, y, x) in zip(batch.patches, batch.positions.tolist(), strict=True):
        patch = normalised[y * 14 : y * 14 + 14, x * 14 : x * 14 + 14].transpose(2, 0, 1)
        expected = np.stack([patch, patch], axis=1).reshape(-1)
        np.testing.assert_allclose(row, expected, atol=1e-5)
        assert time == 0
        seen.add((y, x))
    assert seen == {(y, x) for y in range(4) for x in range(6)}
    first_block = batch.positions[:4, 1:].tolist()
    assert first_block == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_raw_pixels() -> None:
    pixels = np.asarray(noise(56, 84, "RGBA"))
    alpha = pixels[..., 3:] / 255
    expected = pixels[..., :3] * alpha + 255 * (1 - alpha)
    found = np.asarray(image_from_pixels(pixels))
    assert np.abs(found - expected).max() <= 1
    assert image_from_pixels(np.zeros((5, 6, 1), np.uint8)).size == (6, 5)
    for wrong in (
        np.zeros((5, 6, 2), np.uint8),
        np.zeros((5, 6), np.uint8),
        np.zeros((0, 6, 3), np.uint8),
        np.zeros((5, 6, 3), np.float32),
    ):
        with pytest.raises(PreprocessError, match="raw pixels are"):
            image_from_pixels(wrong)


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_keep_their_upper_eight(encode: Any, form: str) -> None:
    values = np.array([[0, 255, 256, 32767], [32768, 65279, 65280, 65535]], np.uint16)
    found = np.asarray(decode_image(encode(Image.fromarray(values), form)))
    np.testing.assert_array_equal(found, (values >> 8)[..., None].repeat(3, axis=2))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_is_the_same_in_strips(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    image = noise(50, 30, "RGBA").convert(mode)
    if mode == "P":
        image.info["transparency"] = bytes(range(256))
    whole = to_rgb(image)
    monkeypatch.setattr("m3trt.preprocess.image.STRIP_ROWS", 7)
    assert to_rgb(image).tobytes() == whole.tobytes()


class TestBadInput:
    @pytest.mark.parametrize(
        ("values", "found"),
        [
            (np.full((4, 4), 0.5, np.float32), "float32 pixels from 0.5 to 0.5"),
            (np.full((4, 4), 1 << 16, np.int32), "int32 pixels from 65536 to 65536"),
            (np.full((4, 4), -1, np.int32), "int32 pixels from -1 to -1"),
        ],
    )
    def test_wide_pixels(self, encode: Any, values: Any, found: str) -> None:
        with pytest.raises(PreprocessError, match=f"{found}, expected integers of at most 16 bits"):
            decode_image(encode(Image.fromarray(values), "TIFF"))

    @pytest.mark.parametrize("content", [b"", b"\x00", b"hello, world", b"<svg></svg>"])
    def test_not_a_picture(self, content: bytes) -> None:
        with pytest.raises(PreprocessError, match="not a picture"):
            decode_image(content)

    @pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
    def test_truncated(self, encode: Any, form: str) -> None:
        content = encode(noise(100, 100), form)
        with pytest.raises(PreprocessError):
            decode_image(content[: len(content) // 2])

    @pytest.mark.parametrize(
        ("side", "message"),
        [
            (9000, "9000x9000 pixels, at most 64000000"),
            (50000, "claims far more than 64000000 pixels"),
        ],
    )
    def test_bomb(self, encode: Any, side: int, message: str) -> None:
        """Few bytes that claim many pixels are refused from the header."""
        content = bytearray(encode(Image.new("1", (1, 1)), "PNG"))
        content[16:24] = struct.pack(">II", side, side)
        content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
        with pytest.raises(PreprocessError, match=message):
            decode_image(bytes(content))

    def test_external_programs_stay_out(self) -> None:
        content = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n%%EndComments\nshowpage\n"
        with pytest.raises(PreprocessError, match="not a picture"):
            decode_image(content)

    @pytest.mark.full
    @pytest.mark.filterwarnings("ignore::UserWarning")
    @pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "TIFF"])
    def test_corrupted_bytes(self, encode: Any, form: str) -> None:
        """Every outcome is a picture or a PreprocessError."""
        rng = np.random.default_rng(8)
        content = np.frombuffer(encode(noise(40, 40), form), np.uint8)
        for _ in range(150):
            damaged = content.copy()
            places = rng.integers(0, damaged.size, rng.integers(1, 12))
            damaged[places] = rng.integers(0, 256, places.size)
            try:
                decode_image(damaged.tobytes())
            except PreprocessError:
                continue

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_random_bytes(self) -> None:
        rng = np.random.default_rng(9)
        for magic in (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM", b"II*\x00", b"P6"):
            with pytest.raises(PreprocessError):
                decode_image(magic + rng.bytes(500))
