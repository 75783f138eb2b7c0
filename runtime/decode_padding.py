"""Pads decode steps to few different shapes, so that each shape can be a captured CUDA graph."""

from __future__ import annotations

from typing import Any

import numpy as np
from m3trt.runtime.step import Int32, StepInputs


def is_decode_step(inputs: StepInputs) -> bool:
    """Whether every request decodes one token, which is one of the vocabulary."""
    requests = inputs.sequence_length.size
    return (
        inputs.decode_shape == (requests, 1)
        and inputs.input_ids.size == requests > 0
        and inputs.logit_rows.size <= requests
        and inputs.prompt_embedding_table.shape[0] == 1
    )


def padded_requests(requests: int, most: int) -> int:
    """1, 2, 4, 8, then multiples of 8, but at most `most`."""
    if requests <= 8:
        return min(1 << (requests - 1).bit_length(), most)
    return min(-(-requests // 8) * 8, most)


def decode_sizes(most: int) -> list[int]:
    """Every padded number of requests, the smallest first."""
    return sorted({padded_requests(requests, most) for requests in range(1, most + 1)})


def no_requests(hidden_size: int, dtype: np.dtype[Any]) -> StepInputs:
    """A decode step of nobody, which once padded runs every op and changes nothing."""
    none = np.zeros(0, np.int32)
    return StepInputs(
        input_ids=none,
        position_ids=none,
        cu_query_lens=np.zeros(1, np.int32),
        sequence_length=none,
        kv_cache_block_offsets=np.zeros((0, 1), np.int32),
        decode_shape=(0, 1),
        logit_rows=none,
        prompt_embedding_table=np.zeros((1, hidden_size), dtype),
    )


def pad_decode(inputs: StepInputs, requests: int, max_pages: int) -> StepInputs:
    """The decode step with rows up to `requests` and a page table `max_pages` wide.

    A padded row has length 0 and no token: it reads and writes nothing. There are as many logit
    rows as requests; the first ones are those of `inputs.logit_rows`.
    """
    return StepInputs(
        input_ids=_fill(inputs.input_ids, requests, 0),
        position_ids=_fill(inputs.position_ids, requests, 0),
        cu_query_lens=_fill(inputs.cu_query_lens, requests + 1, int(inputs.cu_query_lens[-1])),
        sequence_length=_fill(inputs.sequence_length, requests, 0),
        kv_cache_block_offsets=_page_table(inputs.kv_cache_block_offsets, requests, max_pages),
        decode_shape=(requests, 1),
        logit_rows=_fill(inputs.logit_rows, requests, 0),
        prompt_embedding_table=inputs.prompt_embedding_table,
    )


def _fill(array: Int32, size: int, value: int) -> Int32:
    return np.concatenate([array, np.full(size - array.size, value, np.int32)])


def _page_table(table: Int32, rows: int, width: int) -> Int32:
    wide = np.full((rows, width), -1, np.int32)
    wide[: table.shape[0], : table.shape[1]] = table
    return wide
