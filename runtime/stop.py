"""Where a generation ends: end ids, and stop words found on bytes across token borders.

No byte of a stop word is ever released: ids whose bytes may still turn out to belong to one are
held back until the next ids decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Released:
    """Ids that may be shown now, in order.

    `stopped` ends the generation. `trim_bytes` is not 0 when a stop word starts inside the last of
    `ids`: that many bytes at the end of that id's bytes belong to the stop word.
    """

    ids: tuple[int, ...]
    stopped: bool = False
    trim_bytes: int = 0


class StopMatcher:
    """Follows one generation. Of several stop words the one that is complete first wins."""

    def __init__(self, stop_words: Sequence[bytes], end_ids: Sequence[int]) -> None:
        self._words = [_Word(word) for word in stop_words]
        self._end_ids = frozenset(end_ids)
        self._held: list[tuple[int, int]] = []
        """Ids not released yet, each with the stream offset where its bytes end."""
        self._length = 0
        self._released = 0

    def feed(self, token_id: int, token: bytes) -> Released:
        """Take the next generated id and its bytes (which may be none)."""
        if token_id in self._end_ids:
            return Released(self.flush(), stopped=True)
        start = self._length
        self._length += len(token)
        self._held.append((token_id, self._length))
        for offset, byte in enumerate(token, start + 1):
            for word in self._words:
                word.advance(byte)
            matched = max((word.matched for word in self._words if word.complete), default=0)
            if matched:
                return self._cut(offset - matched)
        pending = max((word.matched for word in self._words), default=0)
        return Released(self._release(self._length - pending))

    def flush(self) -> tuple[int, ...]:
        """The generation ended otherwise: no stop word follows, so all held ids may be shown."""
        return self._release(self._length)

    def _release(self, end: int) -> tuple[int, ...]:
        """Ids whose bytes end at or before stream offset `end`."""
        count = sum(id_end <= end for _, id_end in self._held)
        ids = tuple(token_id for token_id, _ in self._held[:count])
        if count:
            self._released = self._held[count - 1][1]
            del self._held[:count]
        return ids

    def _cut(self, end: int) -> Released:
        """End the output at stream offset `end`, where the stop word starts."""
        ids = self._release(end)
        if self._released == end:
            return Released(ids, stopped=True)
        straddling, id_end = self._held[0]
        return Released((*ids, straddling), stopped=True, trim_bytes=id_end - end)


class _Word:
    """Knuth-Morris-Pratt: `matched` = longest prefix of the word that ends the stream."""

    def __init__(self, word: bytes) -> None:
        self._word = word
        self._fallback = [0] * len(word)
        self.matched = 0
        for i in range(1, len(word)):
            k = self._fallback[i - 1]
            while k and word[i] != word[k]:
                k = self._fallback[k - 1]
            self._fallback[i] = k + (word[i] == word[k])

    @property
    def complete(self) -> bool:
        return self.matched == len(self._word)

    def advance(self, byte: int) -> None:
        """Take the stream's next byte; not to be called once the word is complete."""
        while self.matched and byte != self._word[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += byte == self._word[self.matched]
