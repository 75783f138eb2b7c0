"""The work of `preprocessing`: from its input tensors to its output tensors."""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from m3trt.preprocess.errors import PreprocessError
from m3trt.preprocess.prompt import ImageSource, Preprocessor
from m3trt.preprocess.tokenizer import Tokenizer
from m3trt.serve.table import client_inputs
from m3trt.serve.values import Arrays, int32, scalar, text, texts

UNSUPPORTED = frozenset(
    (
        "decoder_text_input",
        "length_penalty",
        "num_return_sequences",
        "early_stopping",
        "beam_search_diversity_rate",
        "return_context_logits",
        "return_generation_logits",
        "return_perf_metrics",
        "prompt_embedding_table",
        "prompt_vocab_size",
        "prompt_table_extra_id",
        "lora_task_id",
        "lora_weights",
        "lora_config",
        "guided_decoding_guide_type",
        "guided_decoding_guide",
        "image_input",
        "video_bytes_input",
    )
)
"""What clients of TensorRT-LLM's ensemble may send and this one cannot do."""


def preprocess(preprocessor: Preprocessor, arrays: Arrays) -> dict[str, npt.NDArray[Any]]:
    """Output tensors for one request; those of vision and of unused options are left out.

    Raises:
        PreprocessError: the request is wrong; the text says how.
    """
    query, thinking_mode = text(arrays, "QUERY"), text(arrays, "THINKING_MODE")
    if query is None:
        raise PreprocessError("text_input is missing: send the text, a string")
    if (max_tokens := scalar(arrays, "REQUEST_OUTPUT_LEN", 1)) < 1:
        raise PreprocessError(f"max_tokens is {max_tokens}, expected at least 1 token to generate")
    prompt = preprocessor.process(
        query,
        list(_images(arrays)),
        apply_chat_template=scalar(arrays, "APPLY_CHAT_TEMPLATE", True),
        thinking_mode=None if thinking_mode is None else _decode("thinking_mode", thinking_mode),
    )
    found: dict[str, npt.NDArray[Any]] = {
        "INPUT_ID": prompt.input_ids,
        "REQUEST_INPUT_LEN": int32(prompt.input_ids.size),
    }
    tokenizer = preprocessor.tokenizer
    if words := texts(arrays, "BAD_WORDS_DICT"):
        found["BAD_WORDS_IDS"] = word_list([_encode(tokenizer, "bad_words", w) for w in words])
    if "EMBEDDING_BIAS_WORDS" in arrays or "EMBEDDING_BIAS_WEIGHTS" in arrays:
        found["EMBEDDING_BIAS"] = _bias(tokenizer, preprocessor.config.vocab_size, arrays)
    if preprocessor.config.vision is None:
        return found
    found["_cu_seqlens"] = int32(0)
    if (images := prompt.images) is not None:
        patches = images.patches
        bits = patches if patches.dtype == np.float32 else patches.view(np.uint16)
        found["_pixel_values"] = bits
        found["_patch_positions"] = images.positions
        found["_cu_seqlens"] = images.cu_seqlens
    return found


def refuse_unsupported(parameters: str) -> None:
    """Check a request's parameters (JSON): HTTP `generate` makes one of every unknown key.

    Raises:
        PreprocessError: one is a feature that does not exist here, or a misspelt input.
    """
    known = client_inputs()
    for name in json.loads(parameters or "{}"):
        if name in UNSUPPORTED:
            raise PreprocessError(f"{name} is not supported by this server: remove it")
        if close := difflib.get_close_matches(name, known, n=1, cutoff=0.85):
            raise PreprocessError(f"{name} is not an input, did you mean {close[0]}?")


def word_list(words: list[list[int]]) -> npt.NDArray[np.int32]:
    """TensorRT-LLM's form, int32 [2, ids]: all ids, then where each word ends, padded with -1."""
    ids = list(itertools.chain.from_iterable(words))
    ends = list(itertools.accumulate(len(word) for word in words))
    return np.array([ids, ends + [-1] * (len(ids) - len(ends))], dtype=np.int32)


def _images(arrays: Arrays) -> Iterator[ImageSource]:
    """Pictures of the request: URLs first, then raw pixels [pictures, height, width, channels]."""
    for url in texts(arrays, "IMAGE_URL"):
        yield _decode("image_url_input", url)
    yield from arrays.get("IMAGE_BYTES", ())


def _bias(tokenizer: Tokenizer, vocab_size: int, arrays: Arrays) -> npt.NDArray[np.float32]:
    words = texts(arrays, "EMBEDDING_BIAS_WORDS")
    weights = arrays.get("EMBEDDING_BIAS_WEIGHTS", np.zeros(0, np.float32)).reshape(-1)
    if len(words) != weights.size:
        raise PreprocessError(
            f"embedding_bias_words has {len(words)} words, embedding_bias_weights {weights.size}"
            " weights: send one weight a word"
        )
    bias = np.zeros(vocab_size, np.float32)
    for word, weight in zip(words, weights, strict=True):
        bias[_encode(tokenizer, "embedding_bias_words", word)] += weight
    return bias


def _encode(tokenizer: Tokenizer, name: str, word: bytes) -> list[int]:
    return tokenizer.encode(_decode(name, word))


def _decode(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise PreprocessError(f"{name} is not valid UTF-8: {error}") from error
