"""From a request's text and pictures to what the engines take: the whole preprocessing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from m3trt.build.configuration import BuildConfig
from m3trt.convert.configuration import ConfigError, M3Config
from m3trt.preprocess.chat_template import MAX_RENDERED_CHARS, ChatTemplate
from m3trt.preprocess.errors import PreprocessError
from m3trt.preprocess.fetch import Fetcher
from m3trt.preprocess.image import (
    ImageBatch,
    ImageProcessor,
    decode_image,
    image_from_pixels,
)
from m3trt.preprocess.image_settings import ImageSettings
from m3trt.preprocess.tokenizer import Tokenizer
from PIL import Image

IMAGE_TOKEN = "]<]image[>["
VIDEO_TOKEN = "]<]video[>["
START_OF_IMAGE = "]<]start of image[>["
END_OF_IMAGE = "]<]end of image[>["

MAX_IMAGES = 64
MAX_DECODING = 4
"""Pictures of all requests that are in memory at their full size."""

ImageSource = bytes | str | npt.NDArray[np.uint8]
"""An encoded picture, its URL, or raw pixels uint8 [height, width, channels]."""


@dataclass(frozen=True, slots=True)
class PreprocessedPrompt:
    """`input_ids` int32 [tokens]; an id >= vocab_size stands for image row id - vocab_size.
    `images` holds the vision engine's inputs; None for a prompt without pictures."""

    input_ids: npt.NDArray[np.int32]
    images: ImageBatch | None


class Preprocessor:
    """Prepares requests for one engine or checkpoint; safe to use from several threads."""

    def __init__(
        self,
        config: M3Config,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        image_processor: ImageProcessor | None,
        *,
        fetcher: Fetcher | None = None,
        max_image_tokens: int | None = None,
    ) -> None:
        """
        Args:
            template: None refuses requests that want the chat template.
            image_processor: None refuses pictures.
            max_image_tokens: how many image rows a request may have; None: any number.

        Raises:
            ConfigError: the tokenizer and `config` disagree about placeholders or vocabulary.
        """
        self.config = config
        self.tokenizer = tokenizer
        self._template = template
        self._image_processor = image_processor
        self._fetcher = fetcher or Fetcher()
        self._max_image_tokens = max_image_tokens
        self._decoding = threading.Semaphore(MAX_DECODING)
        for content, expected in (
            (IMAGE_TOKEN, config.image_token_id),
            (VIDEO_TOKEN, config.video_token_id),
        ):
            found = tokenizer.id_of(content)
            if found != expected:
                raise ConfigError(f"tokenizer gives {content!r} id {found}, config says {expected}")
        tokenizer.id_of(START_OF_IMAGE)
        tokenizer.id_of(END_OF_IMAGE)
        if tokenizer.max_id >= config.vocab_size:
            raise ConfigError(
                f"tokenizer.json has id {tokenizer.max_id}, expected ids below vocab_size"
                f" = {config.vocab_size}: larger ones stand for image rows"
            )

    @classmethod
    def load(cls, directory: Path, *, allowed_media_hosts: Iterable[str] = ()) -> Preprocessor:
        """Read an engine directory or a converted checkpoint directory.

        Args:
            allowed_media_hosts: `host` or `host:port` entries whose private addresses pictures
                may be fetched from.

        Raises:
            ConfigError: a file is missing, malformed or contradicts another one.
        """
        config, max_image_tokens = _read_config(directory)
        processor = None
        if config.vision is not None:
            settings = ImageSettings.load(directory, config.vision)
            processor = ImageProcessor(settings, config.dtype)
        return cls(
            config,
            Tokenizer.load(directory),
            ChatTemplate.load(directory),
            processor,
            fetcher=Fetcher(frozenset(host.lower() for host in allowed_media_hosts)),
            max_image_tokens=max_image_tokens,
        )

    def process(
        self,
        text: str | bytes,
        images: Sequence[ImageSource] = (),
        *,
        apply_chat_template: bool = True,
        thinking_mode: str | None = None,
    ) -> PreprocessedPrompt:
        """Prepare one request.

        With `apply_chat_template` the text is the content of one user message, and pictures come
        before it unless it holds a placeholder for each of them. Otherwise the text is the whole
        prompt and holds the placeholders.

        Raises:
            PreprocessError: empty or undecodable text, placeholders that do not match the
                pictures, a picture that cannot be had or read, or what the chat template refuses.
        """
        text = _decode(text)
        if len(images) > MAX_IMAGES:
            raise PreprocessError(
                f"the request has {len(images)} images, at most {MAX_IMAGES} are allowed"
            )
        prompt = self._prompt(text, len(images), apply_chat_template, thinking_mode)
        ids = self._encode(prompt, len(images))
        if not images:
            return PreprocessedPrompt(ids, None)
        if self._image_processor is None:
            raise PreprocessError("this model takes no images: it has no vision tower")
        batch = self._load_images(self._image_processor, images)
        return PreprocessedPrompt(self._insert_rows(ids, batch), batch)

    def _prompt(self, text: str, num_images: int, chat: bool, thinking_mode: str | None) -> str:
        if not text and not (num_images and chat):
            raise PreprocessError("the text is empty: expected at least one character")
        if len(text) > MAX_RENDERED_CHARS:
            raise PreprocessError(
                f"the text has {len(text)} characters, at most {MAX_RENDERED_CHARS} are allowed"
            )
        if not chat:
            if thinking_mode is not None:
                raise PreprocessError("thinking_mode needs apply_chat_template: it is part of it")
            return text
        if self._template is None:
            raise PreprocessError(
                "this model has no chat_template.jinja: send the whole prompt as text_input with"
                " apply_chat_template false"
            )
        if IMAGE_TOKEN not in text:
            text = IMAGE_TOKEN * num_images + text
        message = {"role": "user", "content": text}
        return self._template.render([message], thinking_mode=thinking_mode)

    def _encode(self, prompt: str, num_images: int) -> npt.NDArray[np.int32]:
        """Ids with one placeholder per picture, in its markers."""
        marked = prompt.replace(IMAGE_TOKEN, START_OF_IMAGE + IMAGE_TOKEN + END_OF_IMAGE)
        ids = np.array(self.tokenizer.encode(marked), np.int32)
        found = int((ids == self.config.image_token_id).sum())
        if found != num_images:
            raise PreprocessError(
                f"the text holds {found} placeholders {IMAGE_TOKEN}, the request {num_images}"
                " images: send one placeholder for each image, or none to have them put first"
            )
        if (ids == self.config.video_token_id).any():
            raise PreprocessError(f"the text holds {VIDEO_TOKEN}: video is not supported")
        return ids

    def _insert_rows(self, ids: npt.NDArray[np.int32], batch: ImageBatch) -> npt.NDArray[np.int32]:
        """Replace each picture's placeholder by the ids of its rows."""
        places = np.flatnonzero(ids == self.config.image_token_id)
        counts = np.ones(ids.size, np.int64)
        counts[places] = batch.num_tokens
        expanded = np.repeat(ids, counts)
        rows = self.config.vocab_size + np.arange(sum(batch.num_tokens), dtype=np.int32)
        expanded[expanded == self.config.image_token_id] = rows
        return expanded

    def _load_images(self, processor: ImageProcessor, sources: Sequence[ImageSource]) -> ImageBatch:
        """One picture after the other, so that few are in memory at their full size."""
        resized, tokens, deadline = [], 0, self._fetcher.deadline()
        for index, source in enumerate(sources):
            try:
                content = (
                    self._fetcher.fetch(source, deadline) if isinstance(source, str) else source
                )
                with self._decoding:
                    image = processor.resize(_picture(content))
            except PreprocessError as error:
                raise PreprocessError(f"image {index + 1}: {error}") from error
            tokens += processor.num_tokens(image)
            if self._max_image_tokens is not None and tokens > self._max_image_tokens:
                raise PreprocessError(
                    f"the first {index + 1} images take {tokens} tokens, the engine was built for"
                    f" at most {self._max_image_tokens} (max_multimodal_len): send fewer or"
                    " smaller ones"
                )
            resized.append(image)
        return processor.patchify(resized)


def _picture(content: bytes | npt.NDArray[np.uint8]) -> Image.Image:
    return decode_image(content) if isinstance(content, bytes) else image_from_pixels(content)


def _decode(text: str | bytes) -> str:
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        decoded.encode()
    except UnicodeError as error:
        raise PreprocessError(f"the text is not valid UTF-8: {error}") from error
    return decoded


def _read_config(directory: Path) -> tuple[M3Config, int | None]:
    """The model's configuration and, for an engine directory, its `max_multimodal_len`."""
    path = directory / "config.json"
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ConfigError(f"expected an object, found {type(data).__name__}")
        if "pretrained_config" not in data:
            return M3Config.from_json(data), None
        build = BuildConfig.from_json(data.get("build_config"))
        return M3Config.from_json(data["pretrained_config"]), build.max_multimodal_len
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist: expected a directory of m3trt.build or m3trt.convert"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
