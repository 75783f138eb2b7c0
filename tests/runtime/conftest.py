"""A fake step executor whose logits depend on everything a sequence has in its pages.

Any mistake in page tables, positions, chunks, row order or image rows changes its output, and it
checks each step against the limits on its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from m3trt.runtime.engine import InflightEngine
from m3trt.runtime.request import EngineLimits, GenerationRequest, Output, SamplingParams
from m3trt.runtime.sampling import Sampler
from m3trt.runtime.step import StepInputs

TOKENS: list[bytes] = [
    *[bytes([c]) for c in b"abcdefgh ."],
    *[b"ab", b"abc", b"bc", b"ca", b"aab", b"a b", b"", b""],
    *["é".encode()[:1], "é".encode()[1:], "€".encode()[:2], "€".encode()[2:]],
    *[bytes([b]) for b in "😀".encode()],
    *["日本".encode(), "c日".encode()],
]
VOCAB = len(TOKENS)
HIDDEN = 3


def token_bytes(token: int) -> bytes:
    return TOKENS[token]


def make_limits(**changes: Any) -> EngineLimits:
    defaults: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "dtype": np.dtype(np.float32),
        "tokens_per_block": 4,
        "max_batch_size": 4,
        "max_num_tokens": 16,
        "max_seq_len": 64,
        "max_prompt_rows": 16,
    }
    return EngineLimits(**{**defaults, **changes})


def fake_logits(values: np.ndarray[Any, Any], length: int) -> np.ndarray[Any, Any]:
    """Logits fp32 [VOCAB] of the sequence whose `values` uint64 [length] are given."""
    weights = np.arange(1, length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    key = int((values[:length] * (weights ^ (weights >> np.uint64(29)))).sum())
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(VOCAB, np.float32) * 2


def token_values(ids: np.ndarray[Any, Any], table: np.ndarray[Any, Any] | None) -> Any:
    """What the fake cache stores: the id, or for an image row its features' first bits."""
    values = ids.astype(np.uint64)
    images = ids >= VOCAB
    if images.any():
        assert table is not None
        rows = np.ascontiguousarray(table[ids[images] - VOCAB, 0]).astype(np.float32)
        values[images] = rows.view(np.uint32).astype(np.uint64) + np.uint64(1 << 40)
    return values


class FakeExecutor:
    """`fail_next` makes coming steps raise, a cleared `gate` holds them, `spoil` edits logits."""

    def __init__(self, limits: EngineLimits, num_pages: int) -> None:
        self.num_pages = num_pages
        self.limits = limits
        self.store = np.full((num_pages, limits.tokens_per_block), 0xDEAD, dtype=np.uint64)
        self.steps: list[StepInputs] = []
        self.closed = 0
        self.fail_next: list[Exception] = []
        self.spoil: Callable[[Any], Any] = lambda logits: logits
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def step(self, inputs: StepInputs) -> Any:
        self.entered.set()
        assert self.gate.wait(30)
        self.check(inputs)
        self.steps.append(inputs)
        if self.fail_next:
            self.store[inputs.kv_cache_block_offsets[inputs.kv_cache_block_offsets >= 0]] = 0xBAD
            raise self.fail_next.pop(0)
        size = self.limits.tokens_per_block
        values = token_values(inputs.input_ids, inputs.prompt_embedding_table)
        logits = {}
        for r in range(inputs.sequence_length.size):
            start, end = inputs.cu_query_lens[r : r + 2]
            table = inputs.kv_cache_block_offsets[r]
            for i in range(start, end):
                position = inputs.position_ids[i]
                self.store[table[position // size], position % size] = values[i]
            used = table[: -(-inputs.sequence_length[r] // size)]
            content = self.store[used].reshape(-1)
            for i in range(start, end):
                if i in inputs.logit_rows:
                    logits[i] = fake_logits(content, int(inputs.position_ids[i]) + 1)
        rows = [logits[i] for i in inputs.logit_rows]
        return self.spoil(np.array(rows, np.float32).reshape(len(rows), VOCAB))

    def check(self, inputs: StepInputs) -> None:
        limits, cu = self.limits, inputs.cu_query_lens
        lengths = np.diff(cu)
        requests = inputs.sequence_length.size
        decodes, q_len = inputs.decode_shape
        assert q_len == 1
        assert 1 <= requests <= limits.max_batch_size
        assert cu[0] == 0
        assert cu[-1] == inputs.input_ids.size == inputs.position_ids.size <= limits.max_num_tokens
        assert (lengths >= 1).all()
        assert (lengths[requests - decodes :] == 1).all()
        for array in (
            inputs.input_ids,
            inputs.position_ids,
            cu,
            inputs.sequence_length,
            inputs.kv_cache_block_offsets,
            inputs.logit_rows,
        ):
            assert array.dtype == np.int32
            assert array.flags.c_contiguous
        for r in range(requests):
            first = inputs.sequence_length[r] - lengths[r]
            expected = np.arange(first, inputs.sequence_length[r])
            assert (inputs.position_ids[cu[r] : cu[r + 1]] == expected).all()
            needed = -(-inputs.sequence_length[r] // limits.tokens_per_block)
            assert (inputs.kv_cache_block_offsets[r, :needed] >= 0).all()
        pages = inputs.kv_cache_block_offsets[inputs.kv_cache_block_offsets >= 0]
        assert len(set(pages.tolist())) == pages.size
        assert pages.size == 0 or pages.max() < self.num_pages
        table = inputs.prompt_embedding_table
        assert table.dtype == limits.dtype
        assert table.shape[1] == limits.hidden_size
        images = inputs.input_ids[inputs.input_ids >= VOCAB]
        assert images.size <= limits.max_prompt_rows
        assert (images == VOCAB + np.arange(images.size)).all()
        assert table.shape[0] == max(1, images.size)
        assert (np.diff(inputs.logit_rows) > 0).all()
        decode_rows = np.arange(cu[requests - decodes], cu[-1])
        assert set(decode_rows.tolist()) <= set(inputs.logit_rows.tolist())

    def close(self) -> None:
        self.closed += 1


def naive(request: GenerationRequest) -> tuple[list[int], str, bytes]:
    """One request alone, nothing shared with the engine but the sampler: generated ids without
    the end id, reason, text."""
    sampler = Sampler(request, VOCAB)
    values = list(token_values(request.input_ids, request.prompt_embedding_table))
    ids: list[int] = []
    for _ in range(request.max_tokens):
        logits = fake_logits(np.array(values, np.uint64), len(values))
        token = sampler.sample(logits).token_id
        if token in request.end_ids:
            return ids, "stop", b"".join(map(token_bytes, ids))
        ids.append(token)
        values.append(np.uint64(token))
        text = b"".join(map(token_bytes, ids))
        ends = [text.find(word) + len(word) for word in request.stop_words if word in text]
        if ends:
            first = min(ends)
            words = [w for w in request.stop_words if text[:first].endswith(w)]
            return ids, "stop", text[: first - max(map(len, words))]
    return ids, "length", b"".join(map(token_bytes, ids))


class Receiver:
    """Collects the outputs of one request and checks their order."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.done = threading.Event()
        self.first = threading.Event()

    def __call__(self, output: Output) -> None:
        assert not self.done.is_set(), "an output after the final one"
        self.outputs.append(output)
        self.first.set()
        if output.final:
            self.done.set()

    def wait(self, seconds: float = 20) -> Output:
        assert self.done.wait(seconds), "no final output"
        return self.outputs[-1]

    @property
    def ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.new_ids]

    @property
    def text(self) -> bytes:
        text = b"".join(map(token_bytes, self.ids))
        return text[: len(text) - self.outputs[-1].trim_bytes]

    def check_previous_ids(self) -> None:
        seen: list[int] = []
        for output in self.outputs:
            assert list(output.previous_ids) == seen[-3:]
            seen += [token for token in output.new_ids if token_bytes(token)]


class Rig:
    """An engine on a fake executor, with what tests want to look at."""

    def __init__(self, num_pages: int = 64, max_queue_size: int = 1024, **changes: Any) -> None:
        self.limits = make_limits(**changes)
        self.executor = FakeExecutor(self.limits, num_pages)
        self.engine = InflightEngine(self.executor, self.limits, token_bytes, max_queue_size)

    def submit(self, request: GenerationRequest) -> Receiver:
        receiver = Receiver()
        self.engine.submit(request, receiver)
        return receiver

    def check_no_leak(self) -> None:
        self.engine._pool.check()
        stats = self.engine.stats()
        assert (stats.pages_used, stats.active, stats.waiting) == (0, 0, 0)


class Kit:
    """What test modules use; they cannot import a conftest."""

    VOCAB, HIDDEN, TOKENS = VOCAB, HIDDEN, TOKENS
    FakeExecutor, Receiver = FakeExecutor, Receiver
    limits = staticmethod(make_limits)
    naive = staticmethod(naive)
    token_bytes = staticmethod(token_bytes)

    def __init__(self) -> None:
        self.rigs: list[Rig] = []

    def rig(self, **options: Any) -> Rig:
        self.rigs.append(Rig(**options))
        return self.rigs[-1]

    @staticmethod
    def request(request_id: str = "a", **options: Any) -> GenerationRequest:
        defaults: dict[str, Any] = {"input_ids": np.array([1, 2, 3]), "max_tokens": 8}
        return GenerationRequest(request_id, **{**defaults, **options})

    @staticmethod
    def random_request(rng: np.random.Generator, request_id: str) -> GenerationRequest:
        """Any mix of lengths, images, sampling, stops; fits the default limits."""
        prompt = rng.integers(0, VOCAB, rng.integers(1, 40)).astype(np.int32)
        table = None
        if rng.random() < 0.3:
            rows = int(rng.integers(1, prompt.size + 1))
            start = int(rng.integers(0, prompt.size - rows + 1))
            prompt[start : start + rows] = VOCAB + np.arange(rows)
            table = rng.standard_normal((rows, HIDDEN)).astype(np.float32)
        words = [b"ab", b"abca", b"b c", b"\xa9", "日".encode(), b"c\xe6", b"aaab", b"."]
        sampling = SamplingParams()
        if rng.random() < 0.5:
            sampling = SamplingParams(
                temperature=float(rng.choice([0.3, 1.0, 2.0])),
                top_k=int(rng.choice([0, 5])),
                top_p=float(rng.choice([1.0, 0.8])),
                seed=int(rng.integers(0, 2**63)),
                repetition_penalty=float(rng.choice([1.0, 1.3])),
                presence_penalty=float(rng.choice([0.0, 0.5])),
            )
        return GenerationRequest(
            request_id,
            prompt,
            max_tokens=int(rng.integers(1, 25)),
            sampling=sampling,
            end_ids=(3,) if rng.random() < 0.5 else (),
            stop_words=tuple(rng.choice(words, rng.integers(0, 4), replace=False).tolist()),
            prompt_embedding_table=table,
            streaming=bool(rng.random() < 0.8),
            return_log_probs=bool(rng.random() < 0.3),
        )


@pytest.fixture
def kit() -> Iterator[Kit]:
    kit = Kit()
    yield kit
    for rig in kit.rigs:
        rig.executor.gate.set()
        assert rig.engine.close()
        assert rig.executor.closed == 1
