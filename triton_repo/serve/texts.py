"""The work of `postprocessing`: the text of one response of `tensorrt_llm`, without state."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from m3trt.preprocess.detokenizer import Detokenizer
from m3trt.serve.errors import RequestFailure
from m3trt.serve.values import Arrays, scalar, strings, text, texts


def failure_in(arrays: Arrays) -> RequestFailure | None:
    """The error that a response carries in band."""
    found = texts(arrays, "_error")
    return RequestFailure(found[0].decode(), found[-1].decode()) if found else None


def postprocess(detokenizer: Detokenizer, arrays: Arrays) -> dict[str, npt.NDArray[Any]]:
    """OUTPUT, strings [1], of TOKENS_BATCH int32 [1, n] and the tensors beside it."""
    tokens = arrays["TOKENS_BATCH"].reshape(-1)[: scalar(arrays, "SEQUENCE_LENGTH", 0)]
    written = detokenizer.text(
        np.asarray(arrays["_previous_ids"]).tolist(),
        tokens.tolist(),
        final=bool(text(arrays, "FINISH_REASON")),
        trim_bytes=scalar(arrays, "_trim_bytes", 0),
    )
    return {"OUTPUT": strings(written)}
