"""The tensors of `tensorrt_llm` to an engine request, and engine outputs to its tensors."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from m3trt.runtime.request import GenerationRequest, Output, RequestError, SamplingParams
from m3trt.serve.errors import INTERNAL, RequestFailure
from m3trt.serve.values import Arrays, int32, scalar, strings, texts


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """What a request need not say. `dtype`: NumPy dtype of prompt embedding rows."""

    end_ids: tuple[int, ...]
    exclude_input_in_output: bool
    dtype: np.dtype[Any]
    vocab_size: int
    image_token_id: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """How a request wants its outputs. `echo_ids` go before the first new ids."""

    echo_ids: tuple[int, ...] = ()
    log_probs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False


def parse_request(
    arrays: Arrays, request_id: str, defaults: ModelDefaults
) -> tuple[GenerationRequest, Delivery]:
    """Read one request; its arrays are copied.

    Raises:
        RequestError: a value is wrong; the text says what was expected.
    """
    if (beams := scalar(arrays, "beam_width", 1)) != 1:
        raise RequestError(f"beam_width is {beams}, only 1 is supported: sample with temperature")
    if "input_ids" not in arrays:
        raise RequestError("input_ids is missing, expected the prompt's token ids, int32")
    if "request_output_len" not in arrays:
        raise RequestError(
            "max_tokens is missing (request_output_len of tensorrt_llm), expected an int32"
        )
    ids = arrays["input_ids"].reshape(-1)
    length = scalar(arrays, "input_lengths", ids.size)
    if not 0 <= length <= ids.size:
        raise RequestError(f"input_lengths is {length}, expected 0 to {ids.size}, input_ids' size")
    end_id = scalar(arrays, "end_id", None)
    delivery = Delivery(
        log_probs=scalar(arrays, "return_log_probs", False),
        num_input_tokens=scalar(arrays, "return_num_input_tokens", False),
        num_output_tokens=scalar(arrays, "return_num_output_tokens", False),
    )
    request = GenerationRequest(
        request_id,
        ids[:length],
        scalar(arrays, "request_output_len", 0),
        _sampling(arrays),
        defaults.end_ids if end_id is None else () if end_id < 0 else (end_id,),
        texts(arrays, "stop_words"),
        _prompt_table(arrays, defaults.dtype),
        scalar(arrays, "streaming", False),
        delivery.log_probs,
    )
    if not scalar(arrays, "exclude_input_in_output", defaults.exclude_input_in_output):
        shown = np.where(
            request.input_ids < defaults.vocab_size, request.input_ids, defaults.image_token_id
        )
        delivery = replace(delivery, echo_ids=tuple(shown.tolist()))
    return request, delivery


def _sampling(arrays: Arrays) -> SamplingParams:
    return SamplingParams(
        scalar(arrays, "temperature", None),
        scalar(arrays, "runtime_top_k", 0),
        _top_p(arrays),
        scalar(arrays, "seed", 0),
        scalar(arrays, "repetition_penalty", 1.0),
        scalar(arrays, "presence_penalty", 0.0),
        scalar(arrays, "frequency_penalty", 0.0),
        scalar(arrays, "min_tokens", 0),
        _bad_words(arrays),
        _bias(arrays),
    )


def _top_p(arrays: Arrays) -> float:
    """TensorRT-LLM's clients send 0 for "all tokens"."""
    top_p = float(scalar(arrays, "runtime_top_p", 1.0))
    return 1.0 if top_p == 0 else top_p


def _bad_words(arrays: Arrays) -> tuple[tuple[int, ...], ...]:
    table = arrays.get("bad_words_list")
    if table is None:
        return ()
    ends = [end for end in table[1].tolist() if end >= 0]
    ids = table[0].tolist()
    return tuple(tuple(ids[start:end]) for start, end in itertools.pairwise([0, *ends]))


def _bias(arrays: Arrays) -> tuple[tuple[int, float], ...]:
    bias = arrays.get("embedding_bias")
    if bias is None:
        return ()
    ids = np.flatnonzero(bias)
    return tuple(zip(ids.tolist(), bias[ids].tolist(), strict=True))


def _prompt_table(arrays: Arrays, dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
    """Rows in the engine's dtype; bfloat16 comes as its bit pattern."""
    table = arrays.get("_prompt_embedding_table")
    return None if table is None else table.view(dtype).copy()


def merge(first: Output, second: Output) -> Output:
    """One output that says what two successive ones of a request say."""
    return replace(
        second,
        new_ids=first.new_ids + second.new_ids,
        previous_ids=first.previous_ids,
        log_probs=first.log_probs + second.log_probs,
    )


def output_arrays(output: Output, delivery: Delivery, first: bool) -> dict[str, npt.NDArray[Any]]:
    """The response tensors of `output`; `first` tells the first one of a request."""
    echo = delivery.echo_ids if first else ()
    ids = int32(*echo, *output.new_ids)
    arrays: dict[str, npt.NDArray[Any]] = {
        "output_ids": ids[np.newaxis],
        "sequence_length": int32(ids.size),
        "finish_reason": strings(output.finish_reason or ""),
        "_previous_ids": int32(*output.previous_ids),
        "_trim_bytes": int32(output.trim_bytes),
    }
    if output.finish_reason == "error":
        arrays["_error"] = strings(INTERNAL, output.error)
    if delivery.log_probs:
        arrays["output_log_probs"] = np.array([output.log_probs], dtype=np.float32)
        arrays["cum_log_probs"] = np.array([output.cum_log_prob or 0.0], dtype=np.float32)
    if delivery.num_input_tokens:
        arrays["num_input_tokens"] = int32(output.num_input_tokens)
    if delivery.num_output_tokens:
        arrays["num_output_tokens"] = int32(output.num_output_tokens)
    return arrays


def failure_arrays(failure: RequestFailure) -> dict[str, npt.NDArray[Any]]:
    """The only response of a request that never ran."""
    output = Output("", new_ids=(), finish_reason="error", error=failure.message)
    arrays = output_arrays(output, Delivery(), first=True)
    return {**arrays, "_error": strings(failure.code, failure.message)}
