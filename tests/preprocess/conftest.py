"""A converted demo checkpoint without weights, and transformers' own processor as the oracle."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from m3trt.convert.hf_config import load_source
from m3trt.convert.tiny_config import tiny_config
from m3trt.convert.tiny_tokenizer import train_tokenizer, write_tokenizer_files
from m3trt.preprocess.prompt import Preprocessor
from m3trt.preprocess.tokenizer import Tokenizer
from PIL import Image


@pytest.fixture(scope="session")
def release_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo checkpoint in the released spelling: config and text side only."""
    directory = tmp_path_factory.mktemp("release")
    write_tokenizer_files(directory, train_tokenizer())
    (directory / "config.json").write_text(json.dumps(tiny_config("demo")))
    return directory


@pytest.fixture
def checkpoint_dir(release_dir: Path, tmp_path: Path) -> Path:
    """The same converted; a fresh copy that a test may damage."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    for file in release_dir.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    config = load_source(release_dir, dtype="float32").config
    (directory / "config.json").write_text(json.dumps(config.to_json()))
    return directory


@pytest.fixture
def preprocessor(checkpoint_dir: Path) -> Preprocessor:
    return Preprocessor.load(checkpoint_dir)


@pytest.fixture(scope="session")
def tokenizer(release_dir: Path) -> Tokenizer:
    return Tokenizer.load(release_dir)


@pytest.fixture(scope="session")
def reference(release_dir: Path, importable_torchvision: None) -> SimpleNamespace:
    """transformers' `image_processor`, `tokenizer`, `processor` and `smart_resize`."""
    from transformers import AutoTokenizer
    from transformers.models.minimax_m3_vl.image_processing_minimax_m3_vl import (
        MiniMaxM3VLImageProcessor,
        smart_resize,
    )
    from transformers.models.minimax_m3_vl.processing_minimax_m3_vl import MiniMaxM3VLProcessor

    class ImageTextProcessor(MiniMaxM3VLProcessor):
        """Without the video side, which would need a video decoder."""

        def __init__(self, image_processor: Any, tokenizer: Any) -> None:
            super().__init__(image_processor, tokenizer, None)

        def check_argument_for_proper_class(self, *_: Any) -> None:
            return None

    tokenizer = AutoTokenizer.from_pretrained(release_dir)
    image_processor = MiniMaxM3VLImageProcessor.from_pretrained(release_dir)
    return SimpleNamespace(
        image_processor=image_processor,
        tokenizer=tokenizer,
        processor=ImageTextProcessor(image_processor, tokenizer),
        smart_resize=smart_resize,
    )


@pytest.fixture(scope="session")
def encode() -> Any:
    """Encodes a picture: encode(image, "PNG", **options) -> bytes."""

    def encode_image(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
        buffer = io.BytesIO()
        image.save(buffer, form, **options)
        return buffer.getvalue()

    return encode_image
