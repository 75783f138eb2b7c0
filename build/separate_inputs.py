"""Small inputs of a step that several ops read get a name for each op type.

TensorRT copies an input that several plugins of one region read, a kernel for each such input
and layer, in front of the first of them: four in every sparse layer, about 4 us. An input of its
own for each op type costs nothing: the runtime binds all of them to one address.
"""

from __future__ import annotations

import onnx
from m3trt.build import tensors

SHARED = (
    tensors.CU_QUERY_LENS,
    tensors.SEQUENCE_LENGTH,
    tensors.KV_CACHE_BLOCK_OFFSETS,
    tensors.DECODE_ROWS,
)
SEPARATOR = "@"


def separate_inputs(model: onnx.ModelProto) -> None:
    """Rename, in place, what each op type reads of `SHARED` to its own input, `input@op type`."""
    graph = model.graph
    inputs = {value.name: value for value in graph.input if value.name in SHARED}
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name.split(SEPARATOR)[0] in inputs:
                node.input[place] = f"{name}{SEPARATOR}{node.op_type}"
    read = {name for node in graph.node for name in node.input}
    for name in sorted(name for name in read if SEPARATOR in name):
        own = onnx.ValueInfoProto()
        own.CopyFrom(inputs[original(name)])
        own.name = name
        graph.input.append(own)
    for value in inputs.values():
        graph.input.remove(value)


def original(name: str) -> str:
    """The input of the step that an engine's input is bound to."""
    return name.split(SEPARATOR)[0]
