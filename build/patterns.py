"""Emitters of small patterns of standard ops; `name` is the prefix of their nodes' names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from m3trt.build.graph import Dim, GraphBuilder, Tensor
from onnx import TensorProto

FLOAT = TensorProto.FLOAT


def cast(graph: GraphBuilder, name: str, x: Tensor, dtype: int) -> Tensor:
    if x.dtype == dtype:
        return x
    return graph.node("Cast", name, [x], x.shape, dtype, to=dtype)


def layer_norm(
    graph: GraphBuilder, name: str, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float
) -> Tensor:
    """Layer norm over the last axis in fp32, rounded once to x's dtype."""
    wide = cast(graph, f"{name}.float32", x, FLOAT)
    normed = graph.node(
        "LayerNormalization",
        f"{name}.normed",
        [wide, weight, bias],
        x.shape,
        axis=-1,
        epsilon=epsilon,
    )
    return cast(graph, f"{name}.output", normed, x.dtype)


def swiglu(graph: GraphBuilder, name: str, x: Tensor, alpha: float, limit: float) -> Tensor:
    """Clamped SwiGLU of x [..., gate then up] in fp32, rounded once: g * sigmoid(a g) * (u + 1)."""
    width = x.shape[-1]
    assert isinstance(width, int)
    half = (*x.shape[:-1], width // 2)
    low = graph.number("constants.swiglu_lower_limit", -limit)
    high = graph.number("constants.swiglu_limit", limit)
    slope = graph.number("constants.swiglu_alpha", alpha)
    one = graph.number("constants.one", 1.0)
    wide = cast(graph, f"{name}.float32", x, FLOAT)
    gate, up = split(graph, name, wide, -1, {"gate": width // 2, "up": width // 2})
    gate = graph.node("Min", f"{name}.gate_clamped", [gate, high], half)
    up = graph.node("Clip", f"{name}.up_clamped", [up, low, high], half)
    steep = graph.node("Mul", f"{name}.gate_scaled", [gate, slope], half)
    sigmoid = graph.node("Sigmoid", f"{name}.gate_sigmoid", [steep], half)
    silu = graph.node("Mul", f"{name}.gate_activated", [gate, sigmoid], half)
    shifted = graph.node("Add", f"{name}.up_plus_one", [up, one], half)
    product = graph.node("Mul", f"{name}.product", [silu, shifted], half)
    return cast(graph, f"{name}.output", product, x.dtype)


def split(
    graph: GraphBuilder, name: str, x: Tensor, axis: int, sizes: dict[str, int]
) -> list[Tensor]:
    """Cut x along `axis` into pieces called `name.key`."""
    axis %= len(x.shape)
    outputs = [
        Tensor(f"{name}.{key}", x.dtype, (*x.shape[:axis], size, *x.shape[axis + 1 :]))
        for key, size in sizes.items()
    ]
    lengths = list(sizes.values())
    label = "constants.split_" + "_".join(map(str, lengths))
    counts = graph.constant(label, np.array(lengths, np.int64))
    graph.nodes("Split", f"{name}.split", [x, counts], outputs, axis=axis)
    return outputs


def reshape(graph: GraphBuilder, name: str, x: Tensor, target: Sequence[Dim]) -> Tensor:
    """Reshape to `target`, whose only named dimension follows from the element count."""
    sizes = [-1 if isinstance(dim, str) else dim for dim in target]
    label = "constants.shape_" + "_".join("n" if size == -1 else str(size) for size in sizes)
    shape = graph.constant(label, np.array(sizes, np.int64))
    return graph.node("Reshape", name, [x, shape], target)
