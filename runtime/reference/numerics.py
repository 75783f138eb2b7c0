"""Number formats of the reference ops: stored as the graph says, computed in fp32."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_FLOAT8_MAX = np.float32(448)


def to_float32(x: Array) -> Float32:
    """Exact up-cast; fp32 arrays pass through."""
    return x if x.dtype == np.float32 else x.astype(np.float32)


def round_to(x: Float32, dtype: np.dtype[Any]) -> Array:
    """Round fp32 to the nearest value of `dtype`, ties to even; e4m3 saturates at its maximum."""
    if dtype == np.float32:
        return x
    if dtype == FLOAT8:
        x = np.clip(x, -_FLOAT8_MAX, _FLOAT8_MAX)
    return x.astype(dtype)


class Upcast:
    """The fp32 copies of one node's weights, made when a weight is first seen.

    A weight is recognised by identity: the executor binds the same arrays in every step.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Array, Float32]] = {}

    def __call__(self, weight: Array) -> Float32:
        source, copy = self._copies.get(id(weight), (None, None))
        if copy is None or source is not weight:
            copy = to_float32(weight)
            self._copies[id(weight)] = (weight, copy)
        return copy


_STEP = 1 / 512
_KNOTS = np.arange(0, 6, _STEP)
_ERF_AT_KNOTS = np.array([math.erf(x) for x in _KNOTS])
_SLOPE_AT_KNOTS = 2 / math.sqrt(math.pi) * np.exp(-(_KNOTS**2))


def erf(x: Float32) -> npt.NDArray[np.float64]:
    """The error function to 1e-12: third-order Taylor expansion around tabulated knots."""
    size = np.minimum(np.abs(x.astype(np.float64)), _KNOTS[-1])
    nearest = np.rint(np.nan_to_num(size) / _STEP).astype(np.intp)
    knot, d = _KNOTS[nearest], size - _KNOTS[nearest]
    series = d - knot * d**2 + (2 * knot**2 - 1) / 3 * d**3
    result: npt.NDArray[np.float64] = _ERF_AT_KNOTS[nearest] + _SLOPE_AT_KNOTS[nearest] * series
    return np.copysign(result, x)


def gelu_erf(x: Float32) -> Float32:
    """Exact GELU, x * Phi(x)."""
    return (0.5 * x * (1 + erf(x * np.float32(math.sqrt(0.5))))).astype(np.float32)


def sigmoid(x: Float32) -> Float32:
    """1 / (1 + exp(-x)); exp may overflow to inf, which gives the right limit 0."""
    with np.errstate(over="ignore"):
        result: Float32 = np.reciprocal(1 + np.exp(-x))
    return result


def swiglu(gate: Float32, up: Float32, alpha: float, limit: float) -> Float32:
    """M3's clamped SwiGLU: gate has no lower clamp, up is shifted by one."""
    gate = np.minimum(gate, np.float32(limit))
    up = np.clip(up, np.float32(-limit), np.float32(limit))
    return gate * sigmoid(np.float32(alpha) * gate) * (up + 1)
