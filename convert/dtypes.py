"""Element types of safetensors files and the value conversions between them."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import numpy.typing as npt

NUMPY_DTYPES: dict[str, npt.DTypeLike] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": np.uint8,
    "F64": np.float64,
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
}
"""safetensors' spelling -> NumPy. E8M0 scales stay bytes: they are looked up, not computed with."""

FLOATS = ("BF16", "F32", "F16")
"""Dtypes a plain weight may be stored in."""

SCALE_BLOCK = 32
"""Inputs (last axis) that share one MXFP8 scale."""


def item_bytes(dtype: str) -> int:
    return np.dtype(NUMPY_DTYPES[dtype]).itemsize


def cast(values: npt.NDArray[np.generic], dtype: str) -> npt.NDArray[np.generic]:
    """Convert to `dtype`, rounding to nearest even where it is narrower."""
    target = np.dtype(NUMPY_DTYPES[dtype])
    if target == ml_dtypes.bfloat16 and values.dtype == np.float16:
        values = values.astype(np.float32)
    return values.astype(target, copy=False)


def gemma_scale(values: npt.NDArray[np.generic], dtype: str) -> npt.NDArray[np.generic]:
    """What a Gemma norm multiplies with: 1 + w in fp32, where a bf16 sum would lose bits of w."""
    return cast(np.float32(1.0) + values.astype(np.float32), dtype)


def dequantise(
    values: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8], dtype: str
) -> npt.NDArray[np.generic]:
    """MXFP8 to `dtype`: exactly value * 2**(scale - 127), rounded only below bf16's range.

    Args:
        values: e4m3 bit patterns [rows, inputs].
        scales: E8M0 bit patterns [rows, inputs / 32].
    """
    rows, inputs = values.shape
    index = (scales.astype(np.uint16) << 8)[:, :, None] | values.reshape(rows, -1, SCALE_BLOCK)
    return _mxfp8_products(dtype).take(index).reshape(rows, inputs)


@functools.cache
def _mxfp8_products(dtype: str) -> npt.NDArray[np.generic]:
    """All 65,536 products, indexed by scale << 8 | value. The fp32 products are exact."""
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scales = np.ldexp(1.0, np.arange(256) - 127)
    scales[255] = np.nan
    with np.errstate(over="ignore"):
        products = np.multiply.outer(scales, values).astype(np.float32)
    return cast(products.ravel(), dtype)
