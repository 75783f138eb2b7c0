"""Ids to text, a few at a time, as a pure function.

A response carries its new ids and up to three ids with text before them. That is all the state
there is: an unfinished UTF-8 character has at most three bytes, so three ids hold it, and a
special token that is not shown ends the character before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence

from m3trt.preprocess.tokenizer import Tokenizer

MAX_PREVIOUS_IDS = 3
"""Ids before the new ones that decide how the new ones read."""


class Detokenizer:
    """Turns the ids of one response into its text; holds no state between calls."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens

    def text(
        self,
        previous_ids: Sequence[int],
        new_ids: Sequence[int],
        *,
        final: bool,
        trim_bytes: int = 0,
    ) -> str:
        """The text that `new_ids` add.

        Args:
            previous_ids: the last ids with bytes (`Tokenizer.token_bytes`) before `new_ids`,
                oldest first; three suffice.
            new_ids: the ids of this response.
            final: no ids follow, so an unfinished character is written as U+FFFD instead of
                being held back.
            trim_bytes: how many bytes at the end of `new_ids` are not to be shown, because a
                stop word begins inside a token. Only with `final`.

        Over any split of an id sequence the returned pieces join to the text of the whole.

        Raises:
            ValueError: `trim_bytes` exceeds the bytes of `new_ids`, or `final` is false with it.
        """
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for piece in self._pieces(previous_ids[-MAX_PREVIOUS_IDS:]):
            decoder.decode(piece or b"", final=piece is None)
        pieces = list(self._pieces(new_ids))
        if trim_bytes:
            if not final:
                raise ValueError("trim_bytes needs final: nothing may follow a stop word")
            pieces = self._trim(new_ids, pieces, trim_bytes)
        text = [decoder.decode(piece or b"", final=piece is None) for piece in pieces]
        return "".join(text) + decoder.decode(b"", final=final)

    def _pieces(self, ids: Sequence[int]) -> Iterator[bytes | None]:
        """The bytes of each id; None for a special token that is not shown: it flushes."""
        for id_ in ids:
            hidden = self._skip_special_tokens and self._tokenizer.is_special(id_)
            yield None if hidden else self._tokenizer.token_bytes(id_)

    def _trim(
        self, ids: Sequence[int], pieces: list[bytes | None], trim_bytes: int
    ) -> list[bytes | None]:
        """Drop `trim_bytes` bytes, those of hidden tokens counted too, from the end."""
        kept, left = list(pieces), trim_bytes
        while left > 0 and kept:
            token = self._tokenizer.token_bytes(ids[len(kept) - 1])
            piece = kept.pop()
            if len(token) > left and piece is not None:
                kept.append(token[: len(token) - left])
            left -= len(token)
        if left > 0:
            raise ValueError(f"trim_bytes is {trim_bytes}, {left} more than new_ids have")
        return kept
