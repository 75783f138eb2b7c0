"""One request while it is being served: its tokens, where it stands, and what to deliver next."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from m3trt.runtime.request import FinishReason, GenerationRequest, Output
from m3trt.runtime.sampling import Sampler
from m3trt.runtime.stop import StopMatcher

PREVIOUS_IDS = 3
"""A UTF-8 character has at most 4 bytes, so 3 earlier tokens with text can always complete it."""


class Sequence:
    """Prompt and answer of one request. `computed` of its `length` tokens are in the cache."""

    def __init__(
        self,
        request: GenerationRequest,
        vocab_size: int,
        token_bytes: Callable[[int], bytes],
        on_output: Callable[[Output], None],
    ) -> None:
        self.request = request
        self.on_output = on_output
        self.prompt_length = int(request.input_ids.size)
        self.length = self.prompt_length
        self.computed = 0
        self.pages: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._vocab_size = vocab_size
        self._token_bytes = token_bytes
        self._matcher = StopMatcher(request.stop_words, request.end_ids)
        self._sampler: Sampler | None = None
        self._last_id = -1
        self._without_text: set[int] = set()
        self._undelivered: list[int] = []
        self._previous: tuple[int, ...] = ()
        self._log_probs: list[float] = []
        self._cum_log_prob = 0.0

    @property
    def max_cached(self) -> int:
        """Most tokens that will ever be in the cache: the last one generated is never fed back."""
        return self.prompt_length + self.request.max_tokens - 1

    @property
    def num_generated(self) -> int:
        return self.length - self.prompt_length

    @property
    def decoding(self) -> bool:
        """The whole prompt is in the cache and the next input is the last generated token."""
        return self.computed >= self.prompt_length

    def next_ids(self, count: int) -> npt.NDArray[np.int32]:
        """The next `count` tokens to compute: of the prompt, or the one generated last."""
        if self.decoding:
            return np.array([self._last_id], dtype=np.int32)
        return self.request.input_ids[self.computed : self.computed + count]

    def append(self, logits: npt.NDArray[np.float32]) -> Output | None:
        """Choose the next token from `logits` [vocab_size]; what may be delivered now, if anything.

        Raises:
            SamplingError: the logits allow no token.
        """
        if self._sampler is None:
            self._sampler = Sampler(self.request, self._vocab_size)
        sampled = self._sampler.sample(logits)
        self._last_id = sampled.token_id
        self.length += 1
        if sampled.log_prob is not None:
            self._log_probs.append(sampled.log_prob)
        token = self._token_bytes(sampled.token_id)
        if not token:
            self._without_text.add(sampled.token_id)
        released = self._matcher.feed(sampled.token_id, token)
        self._undelivered.extend(released.ids)
        if released.stopped:
            return self._deliver("stop", trim_bytes=released.trim_bytes)
        if self.num_generated == self.request.max_tokens:
            return self.finish("length")
        if self.request.streaming and self._undelivered:
            return self._deliver(None)
        return None

    def finish(self, reason: FinishReason, error: str = "") -> Output:
        """The final output of a sequence that ends for another reason than a stop."""
        self._undelivered.extend(self._matcher.flush())
        return self._deliver(reason, error=error)

    def _deliver(self, reason: FinishReason | None, error: str = "", trim_bytes: int = 0) -> Output:
        new_ids, previous = tuple(self._undelivered), self._previous
        self._undelivered.clear()
        with_text = [token for token in new_ids if token not in self._without_text]
        self._previous = (*previous, *with_text)[-PREVIOUS_IDS:]
        log_probs = tuple(self._log_probs[: len(new_ids)])
        del self._log_probs[: len(new_ids)]
        self._cum_log_prob += sum(log_probs)
        return Output(
            request_id=self.request.request_id,
            new_ids=new_ids,
            previous_ids=previous,
            finish_reason=reason,
            error=error,
            trim_bytes=trim_bytes,
            log_probs=log_probs,
            cum_log_prob=self._cum_log_prob if self.request.return_log_probs else None,
            num_input_tokens=self.prompt_length,
            num_output_tokens=self.num_generated,
        )
