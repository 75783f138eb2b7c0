"""What goes into the engine and what comes out: requests, sampling parameters, outputs.

Every check that needs no engine runs when the object is made; `check_request` adds those that need
the engine's limits. All of them raise `RequestError`, whose text is meant for the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_STOP_WORDS = 64
MAX_STOP_WORD_BYTES = 1024
MAX_BAD_WORDS = 256
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: logits divided by them overflow."""
LARGEST = 1e30
"""Factors and biases beyond this would overflow fp32 logits."""


class RequestError(ValueError):
    """A request cannot be served; the text says what was found, expected and what to change."""


class QueueFullError(RequestError):
    """The waiting queue is full: the same request may succeed later."""


class EngineClosedError(RequestError):
    """The engine is closed or broken and takes no more requests."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RequestError(message)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen.

    `temperature` None means greedy unless `top_k` or `top_p` is given, which alone imply 1.0.
    `top_k` 0 and `top_p` 1 switch those filters off; top-k is applied before top-p. The same
    `seed` gives the same tokens whatever else runs in the batch. `repetition_penalty` looks at
    prompt and output, `presence_penalty` and `frequency_penalty` at the output only. End ids are
    banned until `min_tokens` were generated. `bad_words` are id sequences that are never
    completed, `embedding_bias` pairs (id, bias) are added to the logits.

    Raises:
        RequestError: a value is out of range or not finite.
    """

    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    embedding_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if self.temperature is not None:
            _require(
                0 <= self.temperature <= LARGEST,
                f"temperature is {self.temperature}, expected 0 to {LARGEST:g} (0 is greedy)",
            )
        _require(self.top_k >= 0, f"top_k is {self.top_k}, expected >= 0 (0 considers all tokens)")
        _require(
            0 < self.top_p <= 1,
            f"top_p is {self.top_p}, expected more than 0 and at most 1 (1 considers all tokens)",
        )
        _require(
            0 <= self.seed < 2**64, f"seed is {self.seed}, expected an unsigned 64-bit integer"
        )
        _require(
            1 / LARGEST <= self.repetition_penalty <= LARGEST,
            f"repetition_penalty is {self.repetition_penalty}, expected {1 / LARGEST:g} to"
            f" {LARGEST:g} (1 is off)",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2 <= value <= 2, f"{name} is {value}, expected -2 to 2 (0 is off)")
        _require(self.min_tokens >= 0, f"min_tokens is {self.min_tokens}, expected >= 0")
        _require(
            len(self.bad_words) <= MAX_BAD_WORDS and all(self.bad_words),
            f"bad_words has {len(self.bad_words)} entries, expected at most {MAX_BAD_WORDS}, each"
            " with at least one token id: drop the empty ones",
        )
        _require(
            all(abs(bias) <= LARGEST for _, bias in self.embedding_bias),
            f"embedding_bias holds a weight that is not finite or beyond {LARGEST:g}: use bad_words"
            " to ban a token",
        )

    @property
    def greedy(self) -> bool:
        return self.effective_temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def effective_temperature(self) -> float:
        if self.temperature is not None:
            return self.temperature
        return 1.0 if self.top_k > 0 or self.top_p < 1 else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """One prompt to continue.

    `input_ids` int32 [n]; an id >= vocab_size stands for row id - vocab_size of
    `prompt_embedding_table` [rows, hidden] (engine dtype), whose rows must all be used.
    Generation ends at one of `end_ids` (never part of the output), before the first of
    `stop_words` (raw bytes, found across token borders), or after `max_tokens`. With `streaming`
    every step's tokens are delivered as they come, else all of them in one final output.

    Raises:
        RequestError: the request is wrong whatever the engine.
    """

    request_id: str
    input_ids: Int32
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    end_ids: tuple[int, ...] = ()
    stop_words: tuple[bytes, ...] = ()
    prompt_embedding_table: npt.NDArray[Any] | None = None
    streaming: bool = True
    return_log_probs: bool = False

    def __post_init__(self) -> None:
        ids = np.asarray(self.input_ids)
        _require(
            ids.ndim == 1 and (ids.size == 0 or np.issubdtype(ids.dtype, np.integer)),
            f"input_ids is {ids.dtype} of shape {list(ids.shape)}, expected int32 [n]",
        )
        _require(ids.size > 0, "the prompt is empty, expected at least one token: send some text")
        _require(
            bool(ids.min() >= 0 and ids.max() < 2**31),
            f"input_ids spans {ids.min()} to {ids.max()}, expected 0 to 2**31 - 1",
        )
        object.__setattr__(self, "input_ids", np.array(ids, dtype=np.int32))
        _require(
            self.max_tokens >= 1,
            f"max_tokens is {self.max_tokens}, expected at least 1 token to generate",
        )
        _require(
            self.sampling.min_tokens <= self.max_tokens,
            f"min_tokens {self.sampling.min_tokens} exceeds max_tokens {self.max_tokens}:"
            " lower it or raise max_tokens",
        )
        _require(
            len(self.stop_words) <= MAX_STOP_WORDS
            and all(0 < len(word) <= MAX_STOP_WORD_BYTES for word in self.stop_words),
            f"stop_words has {len(self.stop_words)} entries with"
            f" {sorted({len(word) for word in self.stop_words})} bytes, expected at most"
            f" {MAX_STOP_WORDS} entries of 1 to {MAX_STOP_WORD_BYTES} bytes",
        )
        table = self.prompt_embedding_table
        _require(
            table is None or (table.ndim == 2 and table.shape[0] > 0),
            f"prompt_embedding_table has shape {None if table is None else list(table.shape)},"
            " expected [rows, hidden] with at least one row: omit it for text",
        )


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the built engine can take; all requests and steps stay within it.

    `dtype` is the NumPy dtype of prompt embedding rows, `max_prompt_rows` how many of them one
    step may carry: 0 for a model that takes text only.
    """

    vocab_size: int
    hidden_size: int
    dtype: np.dtype[Any]
    tokens_per_block: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_prompt_rows: int

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_num_tokens", "max_seq_len", "tokens_per_block"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.max_num_tokens < self.max_batch_size:
            raise ValueError(
                f"max_num_tokens {self.max_num_tokens} is below max_batch_size"
                f" {self.max_batch_size}: one token of each request must fit into a step"
            )


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of one request, its end, or both. A request gets exactly one final output.

    `previous_ids` are up to 3 ids with text that were delivered just before `new_ids`: enough to
    complete a UTF-8 character. `trim_bytes` is 0 except in a final output that a stop word cut
    inside a token: drop that many bytes from the end of the last new id's bytes. `log_probs`
    (natural, of the unmodified logits) go with `new_ids`; `cum_log_prob` is their sum so far.
    Both stay empty unless asked for. `num_output_tokens` counts all tokens generated so far, also
    those not delivered (end id, stop word).
    """

    request_id: str
    new_ids: tuple[int, ...]
    previous_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: str = ""
    trim_bytes: int = 0
    log_probs: tuple[float, ...] = ()
    cum_log_prob: float | None = None
    num_input_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def final(self) -> bool:
        return self.finish_reason is not None


def check_request(request: GenerationRequest, limits: EngineLimits) -> None:
    """Check `request` against the engine.

    Raises:
        RequestError: too long, ids out of range, or a prompt table that does not fit the prompt.
    """
    prompt, end = request.input_ids.size, request.input_ids.size + request.max_tokens
    _require(
        prompt < limits.max_seq_len,
        f"the prompt has {prompt} tokens, the engine takes at most {limits.max_seq_len - 1}"
        f" (max_seq_len {limits.max_seq_len} less one to generate): shorten it",
    )
    _require(
        end <= limits.max_seq_len,
        f"prompt of {prompt} + max_tokens {request.max_tokens} = {end} exceeds max_seq_len"
        f" {limits.max_seq_len}: max_tokens may be at most {limits.max_seq_len - prompt} here",
    )
    named = {
        "end_ids": request.end_ids,
        "bad_words": [token for word in request.sampling.bad_words for token in word],
        "embedding_bias": [token for token, _ in request.sampling.embedding_bias],
    }
    for name, ids in named.items():
        wrong = [token for token in ids if not 0 <= token < limits.vocab_size]
        _require(
            not wrong,
            f"{name} holds token ids {wrong[:5]}, expected 0 to {limits.vocab_size - 1}",
        )
    _check_prompt_table(request, limits)


def _check_prompt_table(request: GenerationRequest, limits: EngineLimits) -> None:
    ids, table = request.input_ids, request.prompt_embedding_table
    rows = np.unique(ids[ids >= limits.vocab_size]) - limits.vocab_size
    if table is None:
        _require(
            rows.size == 0,
            f"the prompt holds token id {int(ids.max())} but no prompt_embedding_table came with"
            f" it: expected ids 0 to {limits.vocab_size - 1}, or a table of image rows",
        )
        return
    _require(
        limits.max_prompt_rows > 0,
        "the request carries images, but this engine was built from a model that takes text only",
    )
    _require(
        table.shape[1] == limits.hidden_size and table.dtype == limits.dtype,
        f"prompt_embedding_table is {table.dtype} {list(table.shape)}, expected {limits.dtype}"
        f" [rows, {limits.hidden_size}]",
    )
    _require(
        rows.size == table.shape[0] and bool(rows[-1] == table.shape[0] - 1),
        f"the prompt uses {rows.size} different rows of a prompt_embedding_table with"
        f" {table.shape[0]} rows, expected each of them: image placeholders and images must match",
    )
