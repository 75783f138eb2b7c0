"""Choosing the next token of one request from its logits.

All randomness comes from one Philox stream a request, keyed by its seed: the result depends neither
on the rest of the batch nor on how steps were scheduled. The vocabulary has 200,064 entries, so
nothing here sorts it: top-k partitions, top-p rejects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from m3trt.runtime.request import GenerationRequest

Float32 = npt.NDArray[np.float32]

PICK_BLOCK = 512


class SamplingError(RuntimeError):
    """The logits allow no token: the model's output is not finite, or everything is banned."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen id and, if asked for, its natural log-probability under the unmodified logits."""

    token_id: int
    log_prob: float | None


class Sampler:
    """The sampling state of one request: call `sample` once for each generated token."""

    def __init__(self, request: GenerationRequest, vocab_size: int) -> None:
        self._params = request.sampling
        self._end_ids = request.end_ids
        self._return_log_probs = request.return_log_probs
        self._output: list[int] = []
        self._random = np.random.Generator(np.random.Philox(key=self._params.seed))
        self._bias_ids = np.array([i for i, _ in self._params.embedding_bias], dtype=np.int64)
        self._bias = np.array([b for _, b in self._params.embedding_bias], dtype=np.float32)
        self._seen: npt.NDArray[np.bool_] | None = None
        if self._params.repetition_penalty != 1:
            self._seen = np.zeros(vocab_size, dtype=np.bool_)
            self._seen[request.input_ids[request.input_ids < vocab_size]] = True
        self._counts: npt.NDArray[np.int32] | None = None
        if self._params.presence_penalty or self._params.frequency_penalty:
            self._counts = np.zeros(vocab_size, dtype=np.int32)

    def sample(self, logits: Float32) -> SampledToken:
        """Choose from `logits` fp32 [vocab_size], which stays unchanged.

        Raises:
            SamplingError: the largest logit is not finite.
        """
        params = self._params
        adjusted = self._adjust(logits)
        peak = adjusted.max()
        if not np.isfinite(peak):
            raise SamplingError(
                f"the largest of {logits.size} logits is {peak} at output token"
                f" {len(self._output)}, expected a finite number: the model's output is broken"
                " or all tokens are banned"
            )
        if params.greedy:
            token = int(adjusted.argmax())
        else:
            token = choose(
                adjusted,
                params.effective_temperature,
                params.top_k,
                params.top_p,
                self._random,
            )
        self._output.append(token)
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1
        return SampledToken(token, log_prob(logits, token) if self._return_log_probs else None)

    def _adjust(self, logits: Float32) -> Float32:
        """Penalties, bias and bans; copies only when one of them applies."""
        params = self._params
        banned = self._banned()
        if self._seen is None and self._counts is None and not banned and not self._bias.size:
            return logits
        logits = logits.copy()
        if self._seen is not None:
            ids = np.flatnonzero(self._seen)
            old, penalty = logits[ids], np.float32(params.repetition_penalty)
            logits[ids] = np.where(old > 0, old / penalty, old * penalty)
        if self._counts is not None:
            ids = np.flatnonzero(self._counts)
            counts = self._counts[ids].astype(np.float32)
            logits[ids] -= np.float32(params.frequency_penalty) * counts
            logits[ids] -= np.float32(params.presence_penalty)
        np.add.at(logits, self._bias_ids, self._bias)
        logits[banned] = -np.inf
        return logits

    def _banned(self) -> list[int]:
        banned: list[int] = []
        if len(self._output) < self._params.min_tokens:
            banned.extend(self._end_ids)
        for word in self._params.bad_words:
            head = len(word) - 1
            if head == 0 or self._output[-head:] == list(word[:-1]):
                banned.append(word[-1])
        return banned


def choose(
    logits: Float32, temperature: float, top_k: int, top_p: float, random: np.random.Generator
) -> int:
    """Draw an id from softmax(logits / temperature), cut to the top k, then to the top p.

    Top-p keeps a token when the tokens more likely than it hold less than `top_p` of the mass. It
    is drawn by rejection: a draw outside that set proves that nothing up to its weight is inside,
    so all of it goes and the next draw comes from the rest. Distributed exactly as the renormalised
    set, in about 1 / p draws instead of a sort.

    Of logits that tie at rank `top_k` the lowest ids stay.
    """
    ids: npt.NDArray[np.int64] | None = None
    if 0 < top_k < logits.size:
        ids = _top_k_ids(logits, top_k)
        logits = logits[ids]
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((logits - logits.max()) / np.float32(temperature))
    total = weights.sum(dtype=np.float64)
    while True:
        index = _pick(weights, random.random())
        if top_p < 1:
            weights[weights <= weights[index]] = 0
            if weights.sum(dtype=np.float64) >= top_p * total:
                continue
        return index if ids is None else int(ids[index])


def log_prob(logits: Float32, token: int) -> float:
    """Natural log of softmax(logits)[token]."""
    peak = logits.max()
    total = np.exp(logits - peak).sum(dtype=np.float64)
    return float(logits[token]) - float(peak) - float(np.log(total))


def _top_k_ids(logits: Float32, top_k: int) -> npt.NDArray[np.int64]:
    """Ascending ids of the k largest logits."""
    border = np.partition(logits, logits.size - top_k)[logits.size - top_k]
    ids = np.flatnonzero(logits >= border)
    if ids.size > top_k:
        at_border = logits[ids] == border
        excess = np.flatnonzero(at_border)[top_k - ids.size :]
        ids = np.delete(ids, excess)
    return ids


def _pick(weights: Float32, uniform: float) -> int:
    """Index i with probability weights[i] / sum, in two levels: blocks, then inside one."""
    starts = np.arange(0, weights.size, PICK_BLOCK)
    sums: npt.NDArray[Any] = np.add.reduceat(weights, starts, dtype=np.float64)
    reached = np.cumsum(sums)
    target = uniform * reached[-1]
    block = min(int(np.searchsorted(reached, target, side="right")), sums.size - 1)
    start = block * PICK_BLOCK
    inside = weights[start : start + PICK_BLOCK]
    within = np.cumsum(inside, dtype=np.float64)
    index = int(np.searchsorted(within, target - (reached[block] - sums[block]), side="right"))
    # Rounding may put the target just past the end: then the last possible token is the one.
    return start + min(index, int(np.flatnonzero(inside)[-1]))
