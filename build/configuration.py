"""What an engine is built for: the limits of one step and the dtypes of its caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from m3trt.convert.configuration import MAX_TENSOR_ELEMENTS, ConfigError, M3Config

CacheDtype = Literal["auto", "fp8"]

MAX_QUERY_LEN = 8
"""Most query tokens of one decode request: one plus seven speculative ones."""

DEFAULT_MULTIMODAL_LEN = 4096
"""Seven of the largest images (576 tokens each) in one step."""

_LEAST = {
    "max_batch_size": 1,
    "max_num_tokens": 1,
    "max_seq_len": 2,  # one token of the prompt and one of the answer
    "max_pages": 1,
    "max_multimodal_len": 0,
}


@dataclass(frozen=True, slots=True)
class BuildConfig:
    """Limits of one engine; `for_model` fills in those that follow from the model.

    max_batch_size: requests of one step. max_num_tokens: packed tokens of one step.
    max_seq_len: tokens of one sequence, prompt and answer. max_pages: pages of each cache.
    max_multimodal_len: rows of `prompt_embedding_table`, and tokens of one vision step; 0 for a
    model without vision. gather_context_logits: whether logits of every token can be asked for.
    Cache dtypes: `auto` is the model's dtype, `fp8` is e4m3 with one scale per layer.
    """

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_pages: int
    max_multimodal_len: int
    gather_context_logits: bool = False
    kv_cache_dtype: CacheDtype = "auto"
    index_cache_dtype: CacheDtype = "auto"

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"{name} is {value!r}, expected a number of at least {least}")
        if self.max_num_tokens < self.max_batch_size:
            raise ConfigError(
                f"max_num_tokens {self.max_num_tokens} is less than max_batch_size"
                f" {self.max_batch_size}: every request of a step needs a token"
            )
        if not isinstance(self.gather_context_logits, bool):
            raise ConfigError(
                f"gather_context_logits is {self.gather_context_logits!r}, expected true or false"
            )
        for name in ("kv_cache_dtype", "index_cache_dtype"):
            if getattr(self, name) not in ("auto", "fp8"):
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected 'auto' or 'fp8'")

    @classmethod
    def for_model(
        cls,
        config: M3Config,
        *,
        max_batch_size: int = 8,
        max_num_tokens: int = 2048,
        max_seq_len: int | None = None,
        max_pages: int | None = None,
        max_multimodal_len: int | None = None,
        gather_context_logits: bool = False,
        kv_cache_dtype: CacheDtype = "auto",
        index_cache_dtype: CacheDtype = "auto",
    ) -> BuildConfig:
        """Fill in defaults and check the limits against the model.

        Raises:
            ConfigError: a limit contradicts the model or another limit.
        """
        max_pages = most_pages(config) if max_pages is None else max_pages
        longest = min(config.max_position_embeddings, max_pages * config.tokens_per_block)
        if max_seq_len is not None and max_seq_len > longest:
            raise ConfigError(
                f"max_seq_len {max_seq_len} is more than {longest}: the model has"
                f" {config.max_position_embeddings} positions, the caches hold"
                f" {max_pages} pages of {config.tokens_per_block} tokens"
            )
        if config.vision is None and max_multimodal_len:
            raise ConfigError(
                f"max_multimodal_len {max_multimodal_len} but the model has no vision tower"
            )
        if max_multimodal_len is None:
            max_multimodal_len = 0 if config.vision is None else DEFAULT_MULTIMODAL_LEN
        return cls(
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            max_seq_len=longest if max_seq_len is None else max_seq_len,
            max_pages=max_pages,
            max_multimodal_len=max_multimodal_len,
            gather_context_logits=gather_context_logits,
            kv_cache_dtype=kv_cache_dtype,
            index_cache_dtype=index_cache_dtype,
        )

    @property
    def max_logit_rows(self) -> int:
        """Most token rows whose logits one step returns."""
        if self.gather_context_logits:
            return self.max_num_tokens
        return min(self.max_num_tokens, self.max_batch_size * MAX_QUERY_LEN)

    def max_pages_per_sequence(self, config: M3Config) -> int:
        """Widest page table row."""
        return -(-self.max_seq_len // config.tokens_per_block)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> BuildConfig:
        """Read `to_json`'s form.

        Raises:
            ConfigError: a key is missing or unknown, or a value is out of range.
        """
        check_keys("build_config", data, {f.name for f in dataclasses.fields(cls)})
        return cls(**data)


def most_pages(config: M3Config) -> int:
    """Most pages for which every cache of one rank stays below 2**31 elements."""
    block = config.tokens_per_block
    page = max(
        2 * block * config.local_num_key_value_heads * config.head_size,
        block * config.sparse_attention.index_head_size,
    )
    return MAX_TENSOR_ELEMENTS // page


def check_keys(what: str, data: Any, expected: set[str]) -> None:
    """Refuse anything but an object with exactly the keys `expected`.

    Raises:
        ConfigError: naming the unknown and the missing keys of `what`.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{what}: expected an object, found {data!r}")
    unknown, missing = sorted(data.keys() - expected), sorted(expected - data.keys())
    if unknown or missing:
        raise ConfigError(f"{what}: unknown keys {unknown}, missing keys {missing}")
