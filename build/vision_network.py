"""The vision tower, projector and patch merger as an ONNX graph, equal on every rank.

One row is one patch; rows come in merge-block order, so `spatial_merge_size^2` consecutive rows
make one output token. Weights are graph inputs named as in `vision.safetensors`
(`convert.layout.vision_tensors`).
"""

from __future__ import annotations

import numpy as np
import onnx
from m3trt.build import ops, patterns, tensors
from m3trt.build.graph import MODEL_DTYPES, SAFETENSORS_DTYPES, GraphBuilder, Tensor
from m3trt.convert.configuration import M3Config, VisionConfig
from m3trt.convert.layout import vision_tensors
from onnx import TensorProto

AXES = 3
"""Rotary axes of a patch: time, row, column."""


def build_vision_network(config: M3Config) -> onnx.ModelProto:
    """patches, positions, cu_seqlens -> features, as `tensors.py` says.

    Raises:
        ValueError: the model has no vision tower.
    """
    if config.vision is None:
        raise ValueError("the checkpoint's config has no vision tower")
    return _VisionNetwork(config, config.vision).model()


class _VisionNetwork:
    def __init__(self, config: M3Config, vision: VisionConfig) -> None:
        self.vision = vision
        self.graph = graph = GraphBuilder()
        dtype = MODEL_DTYPES[config.dtype]
        self.patches = graph.input(tensors.PATCHES, dtype, ["patches", vision.patch_width])
        self.positions = graph.input(tensors.POSITIONS, TensorProto.INT32, ["patches", AXES])
        self.cu_seqlens = graph.input(tensors.CU_SEQLENS, TensorProto.INT32, ["segments+1"])
        for name, spec in vision_tensors(config).items():
            graph.input(name, SAFETENSORS_DTYPES[spec.dtype], spec.shape)

    def model(self) -> onnx.ModelProto:
        x = ops.gemm(
            self.graph, "patch_embedding", self.patches, self.graph["vision.patch_embedding.weight"]
        )
        x = self._norm("pre_layernorm", x)
        cosine, sine = self._rotary_table()
        for layer in range(self.vision.num_hidden_layers):
            x = self._block(f"layers.{layer}", x, cosine, sine)
        x = self._mlp("projector", x)
        group = self.vision.spatial_merge_size**2
        width = x.shape[1]
        assert isinstance(width, int)
        merged = patterns.reshape(self.graph, "merger.groups", x, ["features", group * width])
        return self.graph.model(
            "minimax_m3_vision", [self._mlp("merger", merged, tensors.FEATURES)]
        )

    def _block(self, name: str, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        graph = self.graph
        attended = self._attention(
            f"{name}.attention", self._norm(f"{name}.layernorm1", x), cosine, sine
        )
        x = graph.node("Add", f"{name}.attention.residual", [x, attended], x.shape)
        expanded = self._mlp(f"{name}.mlp", self._norm(f"{name}.layernorm2", x))
        return graph.node("Add", f"{name}.mlp.residual", [x, expanded], x.shape)

    def _attention(self, name: str, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        graph, heads, size = self.graph, self.vision.num_attention_heads, self.vision.head_size
        qkv = patterns.reshape(
            graph, f"{name}.heads", self._linear(f"{name}.qkv", x), ["patches", 3 * heads, size]
        )
        qk, v = patterns.split(graph, f"{name}.qkv", qkv, 1, {"qk": 2 * heads, "v": heads})
        rotated = self._rotate(f"{name}.rotary", qk, cosine, sine)
        q, k = patterns.split(graph, f"{name}.rotary", rotated, 1, {"q": heads, "k": heads})
        attended = ops.varlen_attention(graph, f"{name}.varlen_attention", q, k, v, self.cu_seqlens)
        return self._linear(f"{name}.dense", attended)

    def _rotary_table(self) -> tuple[Tensor, Tensor]:
        """cos and sin fp32 [patches, 1, half] of the angles (t f, h f, w f), f per axis."""
        graph = self.graph
        frequencies = self.vision.head_size // AXES // 2
        exponent = -np.arange(frequencies) / frequencies
        inv_freq = (float(self.vision.rotary_base) ** exponent).astype(np.float32)
        inv_freq_tensor = graph.constant("constants.inv_freq", inv_freq)
        axis = graph.constant("constants.last_axis", np.array([-1], np.int64))
        exact = patterns.cast(graph, "rotary.positions", self.positions, TensorProto.FLOAT)
        column = graph.node("Unsqueeze", "rotary.column", [exact, axis], ("patches", AXES, 1))
        angles = graph.node(
            "Mul", "rotary.angles", [column, inv_freq_tensor], ("patches", AXES, frequencies)
        )
        flat = patterns.reshape(graph, "rotary.flat", angles, ["patches", 1, AXES * frequencies])
        cosine = graph.node("Cos", "rotary.cosine", [flat], flat.shape)
        return cosine, graph.node("Sin", "rotary.sine", [flat], flat.shape)

    def _rotate(self, name: str, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Rotate channel i with i + half in fp32; channels from 2 * half on pass."""
        graph = self.graph
        _, heads, size = x.shape
        half = cosine.shape[2]
        assert isinstance(half, int)
        assert isinstance(size, int)
        shape = ("patches", heads, half)
        sizes = {"first": half, "second": half, "passed": size - 2 * half}
        wide = patterns.cast(graph, f"{name}.float32", x, TensorProto.FLOAT)
        first, second, *passed = patterns.split(
            graph, f"{name}.halves", wide, 2, {k: v for k, v in sizes.items() if v}
        )
        products = {
            key: graph.node("Mul", f"{name}.{key}", [value, factor], shape)
            for key, value, factor in (
                ("first_cosine", first, cosine),
                ("second_sine", second, sine),
                ("second_cosine", second, cosine),
                ("first_sine", first, sine),
            )
        }
        new_first = graph.node(
            "Sub",
            f"{name}.new_first",
            [products["first_cosine"], products["second_sine"]],
            shape,
        )
        new_second = graph.node(
            "Add",
            f"{name}.new_second",
            [products["second_cosine"], products["first_sine"]],
            shape,
        )
        joined = graph.node(
            "Concat", f"{name}.joined", [new_first, new_second, *passed], x.shape, axis=2
        )
        return patterns.cast(graph, f"{name}.output", joined, x.dtype)

    def _mlp(self, name: str, x: Tensor, output: str | None = None) -> Tensor:
        """Two linear layers with an erf gelu between; the result is called `output` if given."""
        graph = self.graph
        weight, bias = graph[f"vision.{name}.fc.weight"], graph[f"vision.{name}.fc.bias"]
        hidden = ops.gemm(graph, f"{name}.fc", x, weight, bias, epilogue="gelu_erf")
        return self._linear(f"{name}.proj", hidden, output)

    def _linear(self, name: str, x: Tensor, output: str | None = None) -> Tensor:
        weight, bias = self.graph[f"vision.{name}.weight"], self.graph[f"vision.{name}.bias"]
        return ops.gemm(self.graph, output or name, x, weight, bias)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.graph[f"vision.{name}.weight"], self.graph[f"vision.{name}.bias"]
        return patterns.layer_norm(
            self.graph, name, x, weight, bias, float(self.vision.norm_epsilon)
        )
