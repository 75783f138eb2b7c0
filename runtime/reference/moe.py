"""M3MoE: router, routed experts and the shared expert of one layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from m3trt.runtime.reference.numerics import (
    Array,
    Float32,
    Int32,
    Upcast,
    round_to,
    sigmoid,
    swiglu,
    to_float32,
)
from m3trt.runtime.reference.op import M3Op


class M3MoE(M3Op):
    """x [N, H] T, cu_query_lens, router_weight f32 [E, H], router_bias f32 [E], then k parts of fc
    [E/k, 2I, H] T, k parts of proj [E/k, H, I] T, shared_fc [2Is, H] T, shared_proj [H, Is] T
    -> [N, H] T.

    Tokens at or beyond the last of cu_query_lens are padding: no expert sees them, their rows are
    0. Everything is fp32 but the activation between fc and proj, which is rounded to T.
    """

    fields = ("expert_parts", "top_k", "routed_scaling_factor", "swiglu_alpha", "swiglu_limit")

    def __init__(self, onnx_node: onnx.NodeProto, run_params: dict[str, Any]) -> None:
        super().__init__(onnx_node, run_params)
        self._upcast = Upcast()

    def _run(
        self,
        x: Array,
        cu_query_lens: Int32,
        router_weight: Float32,
        router_bias: Float32,
        *experts: Array,
        expert_parts: int,
        top_k: int,
        routed_scaling_factor: float,
        swiglu_alpha: float,
        swiglu_limit: float,
    ) -> tuple[Array]:
        if len(experts) != 2 * expert_parts + 2:
            raise self.error(
                f"{len(experts)} expert inputs, {expert_parts} parts need {2 * expert_parts + 2}"
            )
        fc, proj = experts[:expert_parts], experts[expert_parts:-2]

        def expert(rows: Float32, fc_weight: Float32, proj_weight: Float32) -> Float32:
            gate, up = np.split(rows @ fc_weight.T, 2, axis=-1)
            active = round_to(swiglu(gate, up, swiglu_alpha, swiglu_limit), x.dtype)
            return to_float32(active) @ proj_weight.T

        out = np.zeros(x.shape, np.float32)
        real = int(cu_query_lens[-1])
        rows = to_float32(x[:real])
        chosen, weights = route(rows, router_weight, router_bias, top_k)
        weights *= np.float32(routed_scaling_factor)
        for e in np.unique(chosen):
            token, rank = np.nonzero(chosen == e)
            part, row = divmod(int(e), len(fc[0]))
            y = expert(rows[token], self._upcast(fc[part])[row], self._upcast(proj[part])[row])
            out[token] += weights[token, rank, None] * y
        if real:
            out[:real] += expert(rows, self._upcast(experts[-2]), self._upcast(experts[-1]))
        return (round_to(out, x.dtype),)


def route(rows: Float32, weight: Float32, bias: Float32, top_k: int) -> tuple[Array, Float32]:
    """Experts [n, top_k] and their normalised weights.

    The bias only takes part in the choice; equal scores go to the lower expert id.
    """
    p = sigmoid(rows @ weight.T)
    chosen = np.argsort(-(p + bias), axis=-1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(p, chosen, axis=-1)
    return chosen, weights / weights.sum(axis=-1, keepdims=True)
