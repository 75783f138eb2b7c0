"""M3AddRmsNorm: the residual addition and the norm behind it."""

from __future__ import annotations

import numpy as np
from m3trt.runtime.reference.numerics import Array, round_to, to_float32
from m3trt.runtime.reference.op import M3Op


class M3AddRmsNorm(M3Op):
    """x T [M, H], residual T [M, H] (when has_residual), weight f32 [H], rows int32 [N] (when
    has_rows) -> normed T [M or N, H], and with a residual and without rows its sum with x, T
    [M, H].

    The sum is rounded to T; the norm of the rounded sum is fp32 and rounded once.
    """

    fields = ("has_residual", "has_rows", "epsilon")

    def _run(
        self, *inputs: Array, has_residual: int, has_rows: int, epsilon: float
    ) -> tuple[Array, ...]:
        if len(inputs) != 2 + has_residual + has_rows:
            raise self.error(
                f"has_residual {has_residual} and has_rows {has_rows}, found {len(inputs)} inputs"
            )
        x, weight = inputs[0], inputs[1 + has_residual]
        residual = inputs[1] if has_residual else None
        if has_rows:
            rows = inputs[-1]
            x, residual = x[rows], None if residual is None else residual[rows]
        total = x
        if residual is not None:
            total = round_to(to_float32(x) + to_float32(residual), x.dtype)
        wide = to_float32(total)
        mean = np.mean(wide * wide, axis=-1, keepdims=True)
        unit = wide * np.reciprocal(np.sqrt(mean + np.float32(epsilon)))
        normed = round_to(unit * weight, x.dtype)
        return (normed,) if residual is None or has_rows else (normed, total)
