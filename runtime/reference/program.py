"""One ONNX graph made runnable: its inputs by name, its weights mapped and checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from m3trt.build.tensors import is_weight
from m3trt.runtime.reference.add_rms_norm import M3AddRmsNorm
from m3trt.runtime.reference.attention import (
    M3PagedAttention,
    M3SparseAttention,
    M3VarlenAttention,
)
from m3trt.runtime.reference.block_select import M3BlockSelect
from m3trt.runtime.reference.cache_update import M3CacheUpdate
from m3trt.runtime.reference.collectives import Communicator, collective_ops
from m3trt.runtime.reference.embedding import M3Embedding
from m3trt.runtime.reference.gemm import M3Gemm
from m3trt.runtime.reference.moe import M3MoE
from m3trt.runtime.reference.numerics import Array
from m3trt.runtime.weights import find_weights, map_weights, match_weights
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

OPS: list[type[OpRun]] = [
    M3AddRmsNorm,
    M3BlockSelect,
    M3CacheUpdate,
    M3Embedding,
    M3Gemm,
    M3MoE,
    M3PagedAttention,
    M3SparseAttention,
    M3VarlenAttention,
]


@dataclass(frozen=True, slots=True)
class InputType:
    """Dtype and shape of a graph input; dynamic dimensions are names."""

    dtype: np.dtype[Any]
    shape: tuple[int | str, ...]

    def with_sizes(self, **sizes: int) -> tuple[int, ...]:
        """The shape with its named dimensions replaced."""
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.shape)


class Program:
    """Runs one graph. Inputs bound with `bind` stay; the others are given to each `run`."""

    def __init__(self, path: Path, communicator: Communicator, rank: int = 0) -> None:
        model = onnx.load(path)
        self.inputs = {x.name: _input_type(x) for x in model.graph.input}
        self._bound: dict[str, Array] = {}
        ops = [*OPS, *collective_ops(communicator, rank)]
        self._evaluator = ReferenceEvaluator(model, new_ops=ops)

    def bind(self, name: str, array: Array) -> None:
        self._bound[name] = array

    def bind_weights(self, path: Path) -> None:
        """Map a safetensors file that must hold exactly the graph's weights.

        Raises:
            WeightFileError: names every tensor that is missing, unexpected or of another type.
        """
        expected = {
            name: (kind.dtype, kind.with_sizes())
            for name, kind in self.inputs.items()
            if is_weight(name)
        }
        weights = find_weights(path)
        match_weights(path, weights, expected)
        self._bound |= map_weights(path, weights)

    def run(self, output: str, feeds: dict[str, Array]) -> Array:
        """Execute the whole graph and return one of its outputs."""
        with np.errstate(all="ignore"):  # padding rows may hold anything
            results: Any = self._evaluator.run([output], {**self._bound, **feeds})
        array: Array = results[0]
        return array


def _input_type(value: onnx.ValueInfoProto) -> InputType:
    tensor = value.type.tensor_type
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    return InputType(dtype, tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim))
