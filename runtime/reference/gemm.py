"""M3Gemm: every linear layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from m3trt.runtime.reference.numerics import Array, Upcast, gelu_erf, round_to, to_float32
from m3trt.runtime.reference.op import M3Op

EPILOGUES = ("none", "gelu_erf")
OUTPUT_DTYPES = ("same", "float32")


class M3Gemm(M3Op):
    """x [.., K] T, weight [N, K] T, bias [N] T (when has_bias) -> [.., N].

    Accumulation, bias and epilogue are fp32; one rounding to T, or none for float32 output.
    """

    fields = ("has_bias", "epilogue", "output_dtype")
    epilogue: str
    output_dtype: str

    def __init__(self, onnx_node: onnx.NodeProto, run_params: dict[str, Any]) -> None:
        super().__init__(onnx_node, run_params)
        if self.epilogue not in EPILOGUES:
            raise self.error(f"epilogue {self.epilogue!r}, expected one of {EPILOGUES}")
        if self.output_dtype not in OUTPUT_DTYPES:
            raise self.error(f"output_dtype {self.output_dtype!r}, expected one of {OUTPUT_DTYPES}")
        self._upcast = Upcast()

    def _run(
        self, x: Array, weight: Array, *bias: Array, has_bias: int, epilogue: str, output_dtype: str
    ) -> tuple[Array]:
        if len(bias) != has_bias:
            raise self.error(f"has_bias is {has_bias}, found {2 + len(bias)} inputs")
        if x.shape[-1] != weight.shape[1]:
            raise self.error(f"x {list(x.shape)} does not fit weight {list(weight.shape)}")
        rows = to_float32(x.reshape(-1, x.shape[-1]))
        y = rows @ self._upcast(weight).T
        if bias:
            y += self._upcast(bias[0])
        if epilogue == "gelu_erf":
            y = gelu_erf(y)
        y = y.reshape(*x.shape[:-1], weight.shape[0])
        return (round_to(y, np.dtype(np.float32) if output_dtype == "float32" else x.dtype),)
