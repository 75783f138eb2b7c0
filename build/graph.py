"""Collects one ONNX graph. Every tensor keeps its dtype and shape, so the file shows them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 20
IR_VERSION = 10
PLUGIN_DOMAIN = "m3"
PLUGIN_OPSET = 1

Dim = int | str

SAFETENSORS_DTYPES = {
    "BF16": TensorProto.BFLOAT16,
    "F32": TensorProto.FLOAT,
    "F8_E4M3": TensorProto.FLOAT8E4M3FN,
}
"""ONNX element types by their safetensors spelling."""

MODEL_DTYPES = {"bfloat16": TensorProto.BFLOAT16, "float32": TensorProto.FLOAT}
"""ONNX element types by `M3Config.dtype`."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value of the graph: name, ONNX element type, shape (numbers or dimension names)."""

    name: str
    dtype: int
    shape: tuple[Dim, ...]


class GraphBuilder:
    """Adds nodes one by one; a node and its only output carry the same name."""

    def __init__(self) -> None:
        self._inputs: dict[str, Tensor] = {}
        self._constants: dict[str, TensorProto] = {}
        self._values: list[Tensor] = []
        self._nodes: list[onnx.NodeProto] = []

    def input(self, name: str, dtype: int, shape: Sequence[Dim]) -> Tensor:
        self._inputs[name] = Tensor(name, dtype, tuple(shape))
        return self._inputs[name]

    def __getitem__(self, name: str) -> Tensor:
        """The graph input called `name`."""
        return self._inputs[name]

    def constant(self, name: str, value: npt.NDArray[Any]) -> Tensor:
        """A small table in the file; a second one of the same name must hold the same values."""
        proto = numpy_helper.from_array(value, name)
        if self._constants.setdefault(name, proto) != proto:
            raise ValueError(f"constant {name} exists with other values")
        return Tensor(name, proto.data_type, value.shape)

    def number(self, name: str, value: float) -> Tensor:
        """An fp32 scalar."""
        return self.constant(name, np.array(value, np.float32))

    def node(
        self,
        op: str,
        name: str,
        inputs: Sequence[Tensor],
        shape: Sequence[Dim],
        dtype: int | None = None,
        **attributes: Any,
    ) -> Tensor:
        """A standard op with one output; its dtype is that of the first input unless given."""
        out = Tensor(name, inputs[0].dtype if dtype is None else dtype, tuple(shape))
        self.nodes(op, name, inputs, [out], **attributes)
        return out

    def nodes(
        self,
        op: str,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        domain: str = "",
        **attributes: Any,
    ) -> None:
        """A node whose outputs are named one by one."""
        names = [x.name for x in inputs], [x.name for x in outputs]
        self._nodes.append(helper.make_node(op, *names, name=name, domain=domain, **attributes))
        self._values += outputs

    def model(self, name: str, outputs: Sequence[Tensor]) -> onnx.ModelProto:
        """The finished model.

        Raises:
            ValueError: inputs that no node reads; TensorRT would drop them silently.
        """
        read = {x for node in self._nodes for x in node.input}
        if unread := sorted(self._inputs.keys() - read):
            raise ValueError(f"no node of graph {name} reads the inputs {unread}")
        returned = {x.name for x in outputs}
        graph = helper.make_graph(
            self._nodes,
            name,
            [_value_info(x) for x in self._inputs.values()],
            [_value_info(x) for x in outputs],
            initializer=list(self._constants.values()),
            value_info=[_value_info(x) for x in self._values if x.name not in returned],
        )
        opsets = [
            helper.make_opsetid("", OPSET),
            helper.make_opsetid(PLUGIN_DOMAIN, PLUGIN_OPSET),
        ]
        return helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="m3trt"
        )


def _value_info(tensor: Tensor) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(tensor.name, tensor.dtype, tensor.shape)
