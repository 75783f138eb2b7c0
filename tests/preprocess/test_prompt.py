"""Whole requests: prompts token for token as transformers' processor, and refusals."""

from __future__ import annotations

import base64
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from m3trt.build.configuration import BuildConfig
from m3trt.convert.configuration import ConfigError
from m3trt.convert.hf_config import load_source
from m3trt.preprocess.errors import PreprocessError
from m3trt.preprocess.prompt import Preprocessor
from PIL import Image

pytestmark = pytest.mark.smoke

IMAGE = "]<]image[>["
VOCAB = 200064
SMALL, LARGE = Image.new("RGB", (84, 56), "red"), Image.new("RGB", (200, 100), "blue")


def raw(preprocessor: Preprocessor, text: str, images: list[Any]) -> list[int]:
    """Ids with the image rows turned back into placeholders, after checking their order."""
    prompt = preprocessor.process(text, images, apply_chat_template=False)
    ids = prompt.input_ids
    assert ids.dtype == np.int32
    rows = ids[ids >= VOCAB]
    np.testing.assert_array_equal(rows, VOCAB + np.arange(rows.size))
    return np.where(ids >= VOCAB, 200025, ids).tolist()


@pytest.mark.full
@pytest.mark.parametrize(
    "text",
    [
        pytest.param("Hello", id="text"),
        pytest.param(f"{IMAGE}What is it?", id="first"),
        pytest.param(f"  Look: {IMAGE}\n and {IMAGE}{IMAGE} !", id="several"),
        pytest.param(f"]~b]user\n{IMAGE} 你好 🙂[e~[\n]~b]ai\n", id="turns"),
        pytest.param(f"]<]start of image[>[{IMAGE}]<]end of image[>[", id="marked"),
    ],
)
def test_equals_reference(
    reference: SimpleNamespace, preprocessor: Preprocessor, encode: Any, text: str
) -> None:
    images = [SMALL, LARGE, SMALL][: text.count(IMAGE)]
    expected = reference.processor(
        text=text, images=images or None, add_special_tokens=False, return_tensors="np"
    )
    found = raw(preprocessor, text, [encode(image) for image in images])
    assert found == expected["input_ids"][0].tolist()


@pytest.mark.full
def test_random_text_equals_reference(
    reference: SimpleNamespace, preprocessor: Preprocessor, encode: Any
) -> None:
    rng = np.random.default_rng(4)
    words = [
        "a",
        " ",
        "\n",
        "é",
        "你",
        "🙂",
        "]<]",
        "[>[",
        "]~b]",
        "[e~[",
        "<mm:think>",
        "\x00",
        "'s",
    ]
    picture = encode(SMALL)
    for _ in range(60):
        parts = rng.choice(words, 30).tolist()
        count = int(rng.integers(0, 3))
        for position in rng.integers(0, 30, count):
            parts.insert(int(position), IMAGE)
        text = "".join(parts)
        expected = reference.processor(
            text=text,
            images=[SMALL] * count or None,
            add_special_tokens=False,
            return_tensors="np",
        )
        assert raw(preprocessor, text, [picture] * count) == expected["input_ids"][0].tolist()


def test_chat(preprocessor: Preprocessor, encode: Any) -> None:
    prompt = preprocessor.process("Hello")
    text = preprocessor.tokenizer.decode(prompt.input_ids.tolist(), skip_special_tokens=False)
    assert text.startswith("]~!b[]~b]system\n")
    assert text.endswith("]~b]user\nHello[e~[\n]~b]ai\n")
    assert prompt.images is None

    first = preprocessor.process("Hello", [encode(SMALL)], thinking_mode="disabled")
    placed = preprocessor.process(f"{IMAGE}Hello", [encode(SMALL)], thinking_mode="disabled")
    np.testing.assert_array_equal(first.input_ids, placed.input_ids)
    assert first.input_ids[-1] == 200060
    assert first.images is not None
    assert first.images.num_tokens == (6,)
    start = first.input_ids.tolist().index(200029)
    assert first.input_ids[start : start + 8].tolist() == [200029, *range(VOCAB, VOCAB + 6), 200030]

    assert preprocessor.process("", [encode(SMALL)]).images is not None


def test_sources_of_one_picture(preprocessor: Preprocessor, encode: Any) -> None:
    content = encode(LARGE)
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    batches = [
        preprocessor.process("x", [source]).images for source in (content, url, np.asarray(LARGE))
    ]
    for batch in batches:
        assert batch is not None
        np.testing.assert_array_equal(batch.patches, batches[0].patches)


@pytest.mark.parametrize(
    ("text", "pictures", "options", "message"),
    [
        ("", 0, {}, "text is empty"),
        (b"", 0, {"apply_chat_template": False}, "text is empty"),
        ("", 1, {"apply_chat_template": False}, "text is empty"),
        (b"a\xff", 0, {}, "not valid UTF-8"),
        ("a\ud800", 0, {}, "not valid UTF-8"),
        (IMAGE, 0, {}, r"holds 1 placeholders .* the request 0 images"),
        (IMAGE * 2, 1, {}, r"holds 2 placeholders .* the request 1 images"),
        (IMAGE, 2, {}, r"holds 1 placeholders .* the request 2 images"),
        ("a", 1, {"apply_chat_template": False}, "holds 0 placeholders"),
        ("a]<]video[>[", 0, {}, "video is not supported"),
        ("a", 65, {}, "has 65 images, at most 64"),
        ("a", 0, {"thinking_mode": "x"}, "thinking_mode is 'x'"),
        ("a", 0, {"thinking_mode": "enabled", "apply_chat_template": False}, "thinking_mode needs"),
    ],
)
def test_refusals(
    preprocessor: Preprocessor,
    encode: Any,
    text: str | bytes,
    pictures: int,
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(PreprocessError, match=message):
        preprocessor.process(text, [encode(SMALL)] * pictures, **options)


def test_bad_picture_is_named(preprocessor: Preprocessor, encode: Any) -> None:
    for source, message in (
        (b"no picture", "image 2: not a picture"),
        ("file:///etc/passwd", "image 2: image URL 'file:///etc/passwd' is not allowed"),
        (np.zeros((2, 2), np.uint8), "image 2: raw pixels"),
        (np.zeros((2, 500, 3), np.uint8), "image 2: the picture is 500x2: one side is"),
    ):
        with pytest.raises(PreprocessError, match=message):
            preprocessor.process("a", [encode(SMALL), source])


def test_engine_directory(checkpoint_dir: Path, release_dir: Path, encode: Any) -> None:
    """Its limits and its dtype hold; a request over them is refused."""
    path = checkpoint_dir / "config.json"
    config = load_source(release_dir, dtype="bfloat16").config
    build = BuildConfig.for_model(config, max_multimodal_len=6).to_json()
    path.write_text(json.dumps({"pretrained_config": config.to_json(), "build_config": build}))
    preprocessor = Preprocessor.load(checkpoint_dir)
    images = preprocessor.process("a", [encode(SMALL)]).images
    assert images is not None
    assert images.patches.dtype == ml_dtypes.bfloat16
    with pytest.raises(
        PreprocessError, match=r"first 2 images take 12 tokens, .* at most 6 \(max_multimodal_len"
    ):
        preprocessor.process("a", [encode(SMALL)] * 2)


def test_text_only_model(checkpoint_dir: Path, encode: Any) -> None:
    path = checkpoint_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vision": None}))
    (checkpoint_dir / "chat_template.jinja").unlink()
    preprocessor = Preprocessor.load(checkpoint_dir)
    assert preprocessor.process("a", apply_chat_template=False).input_ids.size == 1
    with pytest.raises(PreprocessError, match="no vision tower"):
        preprocessor.process(IMAGE, [encode(SMALL)], apply_chat_template=False)
    with pytest.raises(PreprocessError, match=r"no chat_template\.jinja"):
        preprocessor.process("a")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"pretrained_config": 3}', "\xff"])
def test_malformed_config(checkpoint_dir: Path, content: str) -> None:
    (checkpoint_dir / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config\.json"):
        Preprocessor.load(checkpoint_dir)


def test_contradicting_files(checkpoint_dir: Path) -> None:
    path = checkpoint_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "image_token_id": 7}))
    with pytest.raises(ConfigError, match="id 200025, config says 7"):
        Preprocessor.load(checkpoint_dir)
    path.unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        Preprocessor.load(checkpoint_dir)


def test_vocabulary_larger_than_the_model_s(checkpoint_dir: Path) -> None:
    """Its ids would be taken for image rows."""
    path = checkpoint_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 200060}))
    with pytest.raises(ConfigError, match="id 200060, expected ids below vocab_size = 200060"):
        Preprocessor.load(checkpoint_dir)


@pytest.mark.parametrize("chat", [True, False])
def test_endless_text(
    preprocessor: Preprocessor, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    monkeypatch.setattr("m3trt.preprocess.prompt.MAX_RENDERED_CHARS", 1000)
    with pytest.raises(PreprocessError, match="the text has 1001 characters, at most 1000 are"):
        preprocessor.process("x" * 1001, apply_chat_template=chat)


def test_threads(preprocessor: Preprocessor, encode: Any) -> None:
    """The same requests from several threads give the same results."""
    requests = [("Hello", []), ("What?", [encode(LARGE)]), ("Two", [encode(SMALL)] * 2)]
    expected = [preprocessor.process(*request).input_ids for request in requests]
    failures: list[object] = []

    def work() -> None:
        for _ in range(10):
            for request, ids in zip(requests, expected, strict=True):
                if not np.array_equal(preprocessor.process(*request).input_ids, ids):
                    failures.append(request)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
