"""Random requests for minutes: each is refused with a sentence or prepared consistently."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from m3trt.bench.records import append_record
from m3trt.preprocess.detokenizer import Detokenizer
from m3trt.preprocess.errors import PreprocessError
from m3trt.preprocess.prompt import PreprocessedPrompt, Preprocessor
from PIL import Image

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Pillow's about damaged pictures
]

FUZZ_SECONDS = 240
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
PLAIN = ("Hello", " world", "\n", "é", "日本", "🙂", "{{ 1 }}", "{% for %}", "\0", "\u202e", "]<]")
SPECIAL = ("]<]image[>[", "]<]start of image[>[", "]<]video[>[", "]~b]", "[e~[", "\ud800")


def random_text(rng: np.random.Generator) -> str | bytes:
    if rng.random() < 0.1:
        return rng.bytes(int(rng.integers(0, 60)))
    pieces = [
        *rng.choice(PLAIN, rng.integers(0, 30)),
        *rng.choice(SPECIAL, rng.choice([0, 0, 1, 3])),
    ]
    characters = rng.integers(1, 0xD800, rng.integers(0, 20)).tolist()
    return "".join(rng.permutation([*pieces, *map(chr, characters)]).tolist())


def random_picture(rng: np.random.Generator, encode: Any) -> Any:
    height, width = (int(rng.choice([1, 13, 14, 28, 60, 200, 900])) for _ in range(2))
    pixels = rng.integers(0, 256, (height, width, int(rng.choice([1, 3, 4]))), dtype=np.uint8)
    if rng.random() < 0.2:
        return pixels
    mode = str(rng.choice(["RGB", "L"]))
    plane = pixels[:, :, 0] if pixels.shape[2] == 1 else pixels
    content = encode(Image.fromarray(plane).convert(mode), str(rng.choice(FORMATS)))
    if rng.random() < 0.2:
        damaged = np.frombuffer(content, np.uint8).copy()
        places = rng.integers(0, damaged.size, rng.integers(1, 12))
        damaged[places] = rng.integers(0, 256, places.size)
        content = damaged[: rng.integers(1, damaged.size + 1)].tobytes()
    return content


def check(preprocessor: Preprocessor, prompt: PreprocessedPrompt, pictures: int) -> None:
    vocab = preprocessor.config.vocab_size
    ids = prompt.input_ids
    assert ids.dtype == np.int32
    assert ids.size
    assert ids.min() >= 0
    rows = ids[ids >= vocab]
    np.testing.assert_array_equal(rows, vocab + np.arange(rows.size))
    images = prompt.images
    if images is None:
        assert rows.size == pictures == 0
        return
    assert len(images.grids) == pictures
    assert rows.size == sum(images.num_tokens)
    assert images.patches.shape[0] == images.positions.shape[0] == 4 * rows.size
    assert images.cu_seqlens[-1] == 4 * rows.size
    assert np.isfinite(images.patches.astype(np.float32)).all()


def check_pieces(preprocessor: Preprocessor, ids: Any, rng: np.random.Generator) -> None:
    """The text of the ids is the same in one piece and in two."""
    detokenizer = Detokenizer(preprocessor.tokenizer)
    ids = ids[ids < preprocessor.config.vocab_size].tolist()
    cut = int(rng.integers(0, len(ids) + 1))
    before = [id_ for id_ in ids[:cut] if preprocessor.tokenizer.token_bytes(id_)][-3:]
    halves = detokenizer.text([], ids[:cut], final=False)
    halves += detokenizer.text(before, ids[cut:], final=True)
    assert halves == detokenizer.text([], ids, final=True)


def test_random_requests_for_minutes(preprocessor: Preprocessor, encode: Any) -> None:
    deadline, prepared, refused = time.monotonic() + FUZZ_SECONDS, 0, 0
    while time.monotonic() < deadline:
        rng = np.random.default_rng([99, prepared + refused])
        pictures = [random_picture(rng, encode) for _ in range(rng.choice([0, 0, 1, 1, 2, 5]))]
        text = random_text(rng)
        try:
            prompt = preprocessor.process(
                text,
                pictures,
                apply_chat_template=bool(rng.random() < 0.7),
                thinking_mode=str(rng.choice(["enabled", "x"])) if rng.random() < 0.1 else None,
            )
        except PreprocessError:
            refused += 1
            continue
        prepared += 1
        check(preprocessor, prompt, len(pictures))
        check_pieces(preprocessor, prompt.input_ids, rng)
    assert min(prepared, refused) > 100
    record = {"case": {"what": "preprocess", "refused": refused}, "seconds": FUZZ_SECONDS}
    append_record("fuzz", record | {"runs": prepared + refused}, {"numpy": np.__version__})
