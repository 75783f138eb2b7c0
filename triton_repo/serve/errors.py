"""Errors on their way to the client: a code of Triton and a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from m3trt.preprocess.errors import PreprocessError
from m3trt.runtime.request import EngineClosedError, QueueFullError, RequestError

INVALID_ARG = "INVALID_ARG"
UNAVAILABLE = "UNAVAILABLE"
INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """`code` is the name of a `TritonError` code; decoupled models send it in band."""

    code: str
    message: str


def failure_of(error: Exception) -> RequestFailure:
    """What a client is told about `error`."""
    if isinstance(error, QueueFullError):
        return RequestFailure(UNAVAILABLE, str(error))
    if isinstance(error, EngineClosedError):
        return RequestFailure(INTERNAL, str(error))
    if isinstance(error, RequestError | PreprocessError):
        return RequestFailure(INVALID_ARG, str(error))
    return RequestFailure(INTERNAL, f"{type(error).__name__}: {error}")
