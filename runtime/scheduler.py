"""Which tokens of which requests make up the next step.

In-flight batching, first come first served. A request is admitted once pages for its prompt and all
its `max_tokens` are free, so nothing that was admitted is ever evicted (`guaranteed_no_evict`).
Every step carries one token of each decoding request; what is left of `max_num_tokens` goes to
prompts, oldest first, cut wherever the step ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
from m3trt.runtime.cache import PagePool
from m3trt.runtime.request import EngineLimits, GenerationRequest, RequestError
from m3trt.runtime.sequence import Sequence
from m3trt.runtime.step import StepInputs


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `count` tokens of a sequence."""

    sequence: Sequence
    count: int
    decoding: bool

    @property
    def wants_logits(self) -> bool:
        """Only the last token known so far predicts a new one."""
        return self.sequence.computed + self.count == self.sequence.length


@dataclass(frozen=True, slots=True)
class Step:
    """Inputs of a step and what they are: context chunks first, then one token per decode."""

    inputs: StepInputs
    chunks: tuple[Chunk, ...]

    @property
    def context_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks if not chunk.decoding)


class Scheduler:
    """Holds the waiting and the active sequences; not thread-safe."""

    def __init__(self, limits: EngineLimits, pool: PagePool) -> None:
        self.active: list[Sequence] = []
        self._limits = limits
        self._pool = pool
        self._waiting: deque[Sequence] = deque()

    @property
    def idle(self) -> bool:
        return not self.active and not self._waiting

    def check_fits(self, request: GenerationRequest) -> None:
        """Refuse a request that the cache could not hold even alone.

        Raises:
            RequestError: it needs more pages than there are.
        """
        pool = self._pool
        needed = pool.pages_for(request.input_ids.size + request.max_tokens - 1)
        if needed > pool.num_pages:
            most = pool.num_pages * pool.tokens_per_page + 1 - request.input_ids.size
            raise RequestError(
                f"prompt of {request.input_ids.size} + max_tokens {request.max_tokens} needs"
                f" {needed} cache pages of {pool.tokens_per_page} tokens, the engine has"
                f" {pool.num_pages}: "
                + (f"max_tokens may be at most {most} here" if most > 0 else "shorten the prompt")
            )

    def add(self, sequence: Sequence) -> None:
        """Put a sequence that passed `check_fits` at the end of the queue."""
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a waiting or active sequence and free its pages."""
        if sequence in self.active:
            self.active.remove(sequence)
            self._pool.release(sequence.request.request_id)
        else:
            self._waiting.remove(sequence)

    def plan(self) -> Step | None:
        """Admit what fits and lay out the next step; None when there is nothing to do."""
        self._admit()
        decodes = [Chunk(s, 1, decoding=True) for s in self.active if s.decoding]
        chunks = (*self._context_chunks(self._limits.max_num_tokens - len(decodes)), *decodes)
        return Step(pack(chunks, self._limits), chunks) if chunks else None

    def commit(self, step: Step) -> None:
        """The step ran: its tokens are in the cache now."""
        for chunk in step.chunks:
            chunk.sequence.computed += chunk.count

    def _admit(self) -> None:
        while self._waiting and len(self.active) < self._limits.max_batch_size:
            head = self._waiting[0]
            if not self._pool.fits(head.max_cached):
                return
            head.pages = self._pool.allocate(head.request.request_id, head.max_cached)
            self.active.append(self._waiting.popleft())

    def _context_chunks(self, tokens: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        rows = self._limits.max_prompt_rows
        for sequence in self.active:
            if tokens == 0:
                break
            if sequence.decoding:
                continue
            count = min(tokens, sequence.prompt_length - sequence.computed)
            used = np.cumsum(sequence.next_ids(count) >= self._limits.vocab_size)
            count = int(np.searchsorted(used, rows, side="right"))
            if count == 0:
                continue
            chunks.append(Chunk(sequence, count, decoding=False))
            tokens -= count
            rows -= int(used[count - 1])
        return chunks


def pack(chunks: Items[Chunk], limits: EngineLimits) -> StepInputs:
    """The step's arrays. Image rows are renumbered to a table that holds only this step's rows."""
    counts = np.array([chunk.count for chunk in chunks])
    ends = np.cumsum(counts)
    ids = np.concatenate([chunk.sequence.next_ids(chunk.count) for chunk in chunks])
    starts = np.array([chunk.sequence.computed for chunk in chunks])
    positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
    pages = np.full((len(chunks), max(c.sequence.pages.size for c in chunks)), -1, dtype=np.int32)
    tables = []
    for row, chunk in enumerate(chunks):
        pages[row, : chunk.sequence.pages.size] = chunk.sequence.pages
        own = ids[ends[row] - chunk.count : ends[row]]
        picked = own[own >= limits.vocab_size] - limits.vocab_size
        if picked.size and chunk.sequence.request.prompt_embedding_table is not None:
            tables.append(chunk.sequence.request.prompt_embedding_table[picked])
    images = np.flatnonzero(ids >= limits.vocab_size)
    ids[images] = limits.vocab_size + np.arange(images.size)
    return StepInputs(
        input_ids=ids,
        position_ids=positions.astype(np.int32),
        cu_query_lens=np.concatenate([[0], ends]).astype(np.int32),
        sequence_length=(starts + counts).astype(np.int32),
        kv_cache_block_offsets=pages,
        decode_shape=(sum(chunk.decoding for chunk in chunks), 1),
        logit_rows=(ends[[chunk.wants_logits for chunk in chunks]] - 1).astype(np.int32),
        prompt_embedding_table=(
            np.concatenate(tables)
            if tables
            else np.zeros((1, limits.hidden_size), dtype=limits.dtype)
        ),
    )
