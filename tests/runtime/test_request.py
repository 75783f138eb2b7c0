"""Every wrong request is refused with a sentence that names what was found and expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from m3trt.runtime.request import RequestError, SamplingParams, check_request

pytestmark = pytest.mark.smoke

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", v) for v in (NAN, INF, -INF, -0.1, 1e31)],
        *[("top_p", v) for v in (NAN, INF, 0.0, -0.5, 1.0001)],
        ("top_k", -1),
        *[("seed", v) for v in (-1, 2**64)],
        *[("repetition_penalty", v) for v in (NAN, INF, 0.0, -1.0, 1e-31, 1e31)],
        *[("presence_penalty", v) for v in (NAN, INF, -2.1, 2.1)],
        *[("frequency_penalty", v) for v in (NAN, -INF, -2.1, 2.1)],
        ("min_tokens", -1),
        *[("bad_words", v) for v in (((),), ((1,),) * 257)],
        *[("embedding_bias", v) for v in (((1, NAN),), ((1, -INF),), ((1, 1e31),))],
    ],
)
def test_bad_sampling_params(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"{name}.*(expected|use )"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        pytest.param({"input_ids": np.array([], np.int32)}, "prompt is empty", id="empty"),
        pytest.param({"input_ids": np.array([])}, "prompt is empty", id="empty-float"),
        pytest.param({"input_ids": np.array([1.0])}, "input_ids is float64", id="float"),
        pytest.param({"input_ids": np.array([[1]])}, r"shape \[1, 1\]", id="2d"),
        pytest.param({"input_ids": np.array([-1, 4])}, "spans -1 to 4", id="negative"),
        pytest.param({"input_ids": np.array([2**31])}, r"expected 0 to 2\*\*31", id="overflow"),
        pytest.param({"max_tokens": 0}, "max_tokens is 0", id="zero"),
        pytest.param({"max_tokens": -5}, "max_tokens is -5", id="minus"),
        pytest.param({"sampling": SamplingParams(min_tokens=9)}, "min_tokens 9 exceeds", id="min"),
        pytest.param({"stop_words": (b"",)}, "expected at most 64 entries of 1", id="empty-stop"),
        pytest.param({"stop_words": (b"x" * 1025,)}, r"\[1025\] bytes", id="long-stop"),
        pytest.param({"stop_words": (b"x",) * 65}, "65 entries", id="many-stops"),
        pytest.param(
            {"prompt_embedding_table": np.zeros((0, 3), np.float32)}, "omit it", id="no-rows"
        ),
        pytest.param({"prompt_embedding_table": np.zeros(3, np.float32)}, "rows, hidden", id="1d"),
    ],
)
def test_bad_request(kit: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        kit.request(**options)


def image(kit: Any, rows: int, placeholders: list[int], **table: Any) -> dict[str, Any]:
    shape = (rows, table.get("hidden", kit.HIDDEN))
    return {
        "input_ids": np.array([1, *(kit.VOCAB + p for p in placeholders)]),
        "prompt_embedding_table": np.zeros(shape, table.get("dtype", np.float32)),
    }


def test_request_against_limits(kit: Any) -> None:
    def refused(text: str, limits: Any = None, **options: Any) -> None:
        with pytest.raises(RequestError, match=text):
            check_request(kit.request(**options), limits or kit.limits())

    refused("prompt has 64 tokens, the engine takes at most 63", input_ids=np.ones(64, np.int32))
    refused("max_tokens may be at most 61", max_tokens=62)
    refused("max_tokens may be at most 61", max_tokens=10**12)
    refused(f"holds token id {kit.VOCAB}", input_ids=np.array([kit.VOCAB]))
    refused("uses 0 different rows", prompt_embedding_table=np.zeros((1, 3), np.float32))
    refused("uses 1 different rows .* 2 rows", **image(kit, 2, [0, 0]))
    refused("uses 1 different rows .* 2 rows", **image(kit, 2, [1]))
    refused("uses 2 different rows .* 2 rows", **image(kit, 2, [0, 2]))
    refused("uses 2 different rows .* 1 rows", **image(kit, 1, [0, 1]))
    refused(r"float64 \[1, 3\], expected float32", **image(kit, 1, [0], dtype=np.float64))
    refused(r"float32 \[1, 4\]", **image(kit, 1, [0], hidden=4))
    refused("text only", limits=kit.limits(max_prompt_rows=0), **image(kit, 1, [0]))
    refused("end_ids holds token ids", end_ids=(kit.VOCAB,))
    refused("end_ids holds token ids", end_ids=(-1,))
    refused("bad_words holds", sampling=SamplingParams(bad_words=((1, 99),)))
    refused("embedding_bias holds", sampling=SamplingParams(embedding_bias=((99, 1.0),)))


def test_largest_request_passes(kit: Any) -> None:
    check_request(kit.request(max_tokens=61), kit.limits())
    check_request(kit.request(input_ids=np.ones(63, np.int64), max_tokens=1), kit.limits())
    check_request(kit.request(**image(kit, 2, [0, 1])), kit.limits())


def test_ids_are_copied(kit: Any) -> None:
    ids = np.array([1, 2], np.int32)
    request = kit.request(input_ids=ids)
    ids[:] = 9
    assert request.input_ids.tolist() == [1, 2]
    assert request.input_ids.dtype == np.int32


@pytest.mark.parametrize(
    ("params", "greedy", "temperature"),
    [
        pytest.param({}, True, 0.0, id="default"),
        pytest.param({"temperature": 0.0, "top_p": 0.9}, True, 0.0, id="zero"),
        pytest.param({"temperature": 1e-9}, True, 1e-9, id="tiny"),
        pytest.param({"temperature": 0.7}, False, 0.7, id="temperature"),
        pytest.param({"temperature": 0.7, "top_k": 1}, True, 0.7, id="top-k-1"),
        pytest.param({"top_k": 40}, False, 1.0, id="top-k-implies-1"),
        pytest.param({"top_p": 0.9}, False, 1.0, id="top-p-implies-1"),
    ],
)
def test_when_sampling_is_greedy(params: dict[str, Any], greedy: bool, temperature: float) -> None:
    sampling = SamplingParams(**params)
    assert sampling.greedy == greedy
    assert sampling.effective_temperature == temperature


@pytest.mark.parametrize("field", ["max_batch_size", "max_num_tokens", "max_seq_len"])
def test_limits_must_be_positive(kit: Any, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        kit.limits(**{field: 0})


def test_step_must_hold_a_token_of_each_request(kit: Any) -> None:
    with pytest.raises(ValueError, match="max_num_tokens 3 is below max_batch_size 4"):
        kit.limits(max_num_tokens=3)
