"""Which steps are captured, and that padding changes nothing but shapes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from m3trt.runtime.decode_padding import (
    decode_sizes,
    is_decode_step,
    no_requests,
    pad_decode,
    padded_requests,
)
from m3trt.runtime.step import StepInputs

pytestmark = pytest.mark.smoke


def decode_step(requests=3):
    return StepInputs(
        input_ids=np.arange(5, 5 + requests, dtype=np.int32),
        position_ids=np.arange(100, 100 + requests, dtype=np.int32),
        cu_query_lens=np.arange(requests + 1, dtype=np.int32),
        sequence_length=np.arange(101, 101 + requests, dtype=np.int32),
        kv_cache_block_offsets=np.arange(2 * requests, dtype=np.int32).reshape(requests, 2),
        decode_shape=(requests, 1),
        logit_rows=np.arange(requests, dtype=np.int32)[1:],
        prompt_embedding_table=np.zeros((1, 4), np.float32),
    )


def test_sizes_are_few():
    assert [padded_requests(n, 100) for n in (1, 2, 3, 4, 5, 8, 9, 16, 17, 97)] == [
        *(1, 2, 4, 4, 8, 8, 16, 16, 24, 100)
    ]
    assert padded_requests(3, 3) == 3
    assert decode_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert decode_sizes(3) == [1, 2, 3]
    assert all(padded_requests(n, 64) >= n for n in range(1, 65))


def test_padded_rows_have_no_tokens():
    step = decode_step()
    padded = pad_decode(step, 8, 16)
    assert padded.input_ids.tolist() == [5, 6, 7, 0, 0, 0, 0, 0]
    assert padded.position_ids.tolist() == [100, 101, 102, 0, 0, 0, 0, 0]
    assert padded.cu_query_lens.tolist() == [0, 1, 2, 3, 3, 3, 3, 3, 3]
    assert padded.sequence_length.tolist() == [101, 102, 103, 0, 0, 0, 0, 0]
    assert padded.decode_shape == (8, 1)
    assert padded.logit_rows.tolist() == [1, 2, 0, 0, 0, 0, 0, 0]
    table = padded.kv_cache_block_offsets
    assert table.shape == (8, 16)
    assert (table[:3, :2] == step.kv_cache_block_offsets).all()
    assert (table[:, 2:] == -1).all()
    assert (table[3:] == -1).all()
    assert all(
        value.dtype == np.int32 and value.flags.c_contiguous
        for value in (getattr(padded, f.name) for f in dataclasses.fields(padded))
        if isinstance(value, np.ndarray) and value.ndim == 1
    )


def test_a_full_step_keeps_its_rows():
    padded = pad_decode(decode_step(4), 4, 2)
    assert padded.sequence_length.tolist() == [101, 102, 103, 104]
    assert padded.cu_query_lens.tolist() == [0, 1, 2, 3, 4]


def test_a_step_of_nobody_has_the_shapes_of_any_other():
    nobody = pad_decode(no_requests(4, np.dtype(np.float32)), 8, 16)
    other = pad_decode(decode_step(), 8, 16)
    for field in dataclasses.fields(nobody):
        mine, theirs = getattr(nobody, field.name), getattr(other, field.name)
        assert np.shape(mine) == np.shape(theirs)
        assert np.asarray(mine).dtype == np.asarray(theirs).dtype
    assert not nobody.sequence_length.any()
    assert not nobody.cu_query_lens.any()
    assert (nobody.kv_cache_block_offsets == -1).all()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, True, id="decode"),
        pytest.param({"decode_shape": (2, 1)}, False, id="context-row"),
        pytest.param({"decode_shape": (3, 2)}, False, id="speculative"),
        pytest.param({"input_ids": np.zeros(4, np.int32)}, False, id="padding-tokens"),
        pytest.param({"prompt_embedding_table": np.zeros((2, 4))}, False, id="image-rows"),
    ],
)
def test_only_plain_decode_steps_are_captured(changes, expected):
    assert is_decode_step(dataclasses.replace(decode_step(), **changes)) is expected
