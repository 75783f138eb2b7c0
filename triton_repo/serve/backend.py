"""Between Triton's Python backend and NumPy: the only helpers that need `pb_utils`.

Arrays here have no batch dimension: every model serves batches of one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils
from m3trt.serve.errors import INTERNAL, RequestFailure
from m3trt.serve.streams import EndedStreams

Arrays = dict[str, npt.NDArray[Any]]

CODES = ("INVALID_ARG", "UNAVAILABLE", "CANCELLED", "NOT_FOUND")
"""Codes of other models' errors that are passed on; the rest is INTERNAL."""

_ENDED = EndedStreams()


def parameters_of(args: Mapping[str, str]) -> dict[str, str]:
    """The `parameters` of the model's config.pbtxt, from `initialize`'s arguments."""
    found = json.loads(args["model_config"]).get("parameters", {})
    return {name: value["string_value"] for name, value in found.items()}


def state_file(args: Mapping[str, str], parameters: Mapping[str, str]) -> Path | None:
    """Where the model counts its requests in flight for the supervisor, if there is one."""
    directory = parameters["state_dir"]
    return Path(directory) / args["model_name"] if directory else None


def inputs_of(request: Any) -> Arrays:
    """The request's tensors by name. They live as long as the request: copy what stays."""
    return {tensor.name(): tensor.as_numpy()[0] for tensor in request.inputs()}


def copied_inputs_of(request: Any) -> Arrays:
    """The same, for work that goes on when `execute` has returned."""
    return {name: array.copy() for name, array in inputs_of(request).items()}


def tensors_of(arrays: Mapping[str, npt.NDArray[Any]]) -> list[Any]:
    """Tensors of batch size one."""
    return [pb_utils.Tensor(name, array[np.newaxis]) for name, array in arrays.items()]


def response_of(arrays: Mapping[str, npt.NDArray[Any]]) -> Any:
    return pb_utils.InferenceResponse(tensors_of(arrays))


def error_response(failure: RequestFailure) -> Any:
    code = getattr(pb_utils.TritonError, failure.code)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(failure.message, code))


class CallError(RuntimeError):
    """Another model answered with an error."""

    def __init__(self, failure: RequestFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def call(model: str, arrays: Arrays, outputs: list[str]) -> Arrays:
    """Run a model that is not decoupled.

    Raises:
        CallError: the model's own error.
    """
    return _outputs(_request(model, arrays, outputs, "").exec())


def stream(model: str, arrays: Arrays, outputs: list[str], request_id: str) -> Iterator[Arrays]:
    """The responses of a decoupled model; read to the end even when the caller stops early,
    because an abandoned stream keeps the server from shutting down.

    Raises:
        CallError: the server could not run the model. Nothing follows such a response.
    """
    responses = _request(model, arrays, outputs, request_id).exec(decoupled=True)
    failed = False
    try:
        for response in responses:
            failed = response.has_error()
            if found := _outputs(response):
                yield found
    finally:
        if not failed:
            for _ in responses:
                pass
        _ENDED.keep(responses)


def drop_streams() -> None:
    """Free what `stream` keeps, before the process ends: afterwards it would crash."""
    _ENDED.close()


def _request(model: str, arrays: Arrays, outputs: list[str], request_id: str) -> Any:
    return pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=outputs,
        inputs=tensors_of(arrays),
        request_id=request_id,
    )


def _outputs(response: Any) -> Arrays:
    if response.has_error():
        error = response.error()
        code = next(
            (n for n in CODES if getattr(pb_utils.TritonError, n) == error.code()), INTERNAL
        )
        raise CallError(RequestFailure(code, error.message()))
    return {tensor.name(): tensor.as_numpy()[0].copy() for tensor in response.output_tensors()}
