"""Which token of a packed step belongs to which request, and at which position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from m3trt.runtime.reference.numerics import Array, Int32


@dataclass(frozen=True, slots=True)
class RequestTokens:
    """Tokens `begin`..`end` of a step: the last `end - begin` positions of one request.

    `pages` is the request's row of the page table: block b lies in page `pages[b]`.
    """

    begin: int
    end: int
    sequence_length: int
    pages: Int32

    @property
    def first_position(self) -> int:
        return self.sequence_length - (self.end - self.begin)


def requests_of(
    cu_query_lens: Int32, sequence_length: Int32, page_table: Int32
) -> Iterator[RequestTokens]:
    """The requests of a step that have tokens in it.

    Args:
        cu_query_lens: int32 [R + 1], token offsets; tokens at or beyond the last are padding.
        sequence_length: int32 [R], including this step's tokens; 0 for a padded row.
        page_table: int32 [R, max_pages], -1 beyond a request's end.
    """
    offsets = cu_query_lens.tolist()
    for row, length in enumerate(sequence_length.tolist()):
        begin, end = offsets[row], offsets[row + 1]
        if end > begin and length > 0:
            yield RequestTokens(begin, end, length, page_table[row])


def read_blocks(cache: Array, request: RequestTokens, blocks: Array) -> Array:
    """Copy whole blocks out of a paged lane [P, B, ...]: [len(blocks) * B, ...].

    Slots at or beyond the sequence length hold stale data; the caller masks them.
    """
    taken = cache[request.pages[blocks]]
    return taken.reshape(-1, *cache.shape[2:])
