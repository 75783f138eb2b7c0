"""The demo checkpoint's tokenizer: a small byte-level BPE with M3's special tokens at their ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from m3trt.convert.tiny_template import CHAT_TEMPLATE

NUM_TEXT_TOKENS = 700
"""256 bytes and the merges that the training text yields up to this size."""

END_OF_TURN = 200020

CONTROL_TOKENS = {
    200000: "]!p~[",
    200019: "]~b]",
    200020: "[e~[",
    200021: "]!d~[",
    200024: "]<]speech[>[",
    200025: "]<]image[>[",
    200026: "]<]video[>[",
    200029: "]<]start of image[>[",
    200030: "]<]end of image[>[",
    200031: "]<]start of video[>[",
    200032: "]<]end of video[>[",
    200033: "]<]vision pad[>[",
    200034: "]~!b[",
    200054: "]<]frame[>[",
    200055: "]<]start of frame[>[",
    200056: "]<]end of frame[>[",
}
"""Tokens that a reader of the answer never sees."""

MARKUP_TOKENS = {
    200050: "<think>",
    200051: "</think>",
    200052: "<tool_call>",
    200053: "</tool_call>",
    200058: "]<]minimax[>[",
    200059: "<mm:think>",
    200060: "</mm:think>",
}
"""Single tokens that belong to the answer: parsers need to see them."""

SPLIT_REGEX = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

TRAINING_TEXT = """\
A compiled engine answers a question word by word. The model reads the whole prompt first, then it
writes one token after another, and every token looks back at what was said before. Most of the
earlier words do not matter for the next one, so the engine picks a few blocks of the past that
seem to be useful and reads only these. That is why a very long text costs little more than a
short one. A picture is cut into small square patches. Each patch becomes a vector, four vectors
become one, and the model reads them as if they were words between the start and the end of the
image. What do you see in the picture? I see a blue circle above a red square on a white ground.
The user asks, the assistant answers. You are a helpful assistant. Please describe this image in
one sentence. Is the light green or yellow? It is green, and the house behind the trees is old.
Weights that were drawn at random know nothing about the world: this small model has never seen
a sentence, and its answers mean nothing at all. They only show that each part of the machine
does its work: reading, cutting, counting, choosing, adding, writing. The server can handle many
requests at the same time, some of them long, some short, some with pictures and some without.
Think about it first, then give the answer. Hello! How are you today? Thank you, I am fine.
Numbers such as 1, 2, 3, 10, 42, 100 and 2026 are split into groups of three digits at most.
Der schöne Garten hinter dem Haus ist grün. Le café est déjà fermé. El niño comió mañana.
你好 世界。 这是一个小模型。 你好。 图片里有什么。 Привет мир. こんにちは世界。 naïve façade €5 🙂🙂
"""


def train_tokenizer() -> dict[str, Any]:
    """The content of `tokenizer.json`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TEXT_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    specials = {**CONTROL_TOKENS, **MARKUP_TOKENS}
    # In the vocabulary too: `tokenizers` keeps an added token's id only if the model knows it.
    content["model"]["vocab"].update({text: id_ for id_, text in specials.items()})
    content["added_tokens"] = [
        {
            "id": id_,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": id_ in CONTROL_TOKENS,
        }
        for id_, text in sorted(specials.items())
    ]
    return content


def head_bias(tokenizer: dict[str, Any], vocab_size: int) -> npt.NDArray[np.float32]:
    """How much the demo's head wants each id, [vocab_size]: most for the beginnings of words,
    never for ids without text, parts of characters and special tokens but the end of turn."""
    from tokenizers.decoders import ByteLevel

    bias = np.full(vocab_size, -30.0, np.float32)
    decoder = ByteLevel()
    specials = {*CONTROL_TOKENS, *MARKUP_TOKENS}
    for token, id_ in tokenizer["model"]["vocab"].items():
        text = decoder.decode([token])
        if id_ in specials or not text.strip() or "\N{REPLACEMENT CHARACTER}" in text:
            continue
        if len(text) == 1 and text.isascii():
            bias[id_] = -2.0 if text.isprintable() else -30.0
        else:
            bias[id_] = 0.0 if text.startswith(" ") else -0.7
    bias[END_OF_TURN] = 0.0
    return bias


def write_tokenizer_files(output_dir: Path, tokenizer: dict[str, Any]) -> None:
    """tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json and
    preprocessor_config.json."""
    files: dict[str, dict[str, Any]] = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "bos_token": CONTROL_TOKENS[200034],
            "eos_token": CONTROL_TOKENS[END_OF_TURN],
            "unk_token": CONTROL_TOKENS[200021],
            "clean_up_tokenization_spaces": False,
            "model_max_length": 32768,
        },
        "generation_config.json": {
            "bos_token_id": 200034,
            "eos_token_id": END_OF_TURN,
            "do_sample": True,
            "temperature": 1.0,
            "top_p": 0.95,
        },
        "preprocessor_config.json": {
            "processor_class": "MiniMaxVLProcessor",
            "process_image_mode": "dynamic_res",
            "size": [672, 672],
            "patch_size": 14,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "img_token_compression_config": {
                "image_token_compression_method": "patch_merge",
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "max_image_resolution": 1008,
                "threshold": 1.1,
            },
        },
    }
    for name, content in files.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (output_dir / name).write_text(text, encoding="utf-8")
    (output_dir / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
