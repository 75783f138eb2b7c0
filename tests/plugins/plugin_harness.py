"""One node of domain m3 as an ONNX graph, an engine, and a run on the GPU.

Building needs TensorRT-RTX and no GPU; `run` needs a GPU that the installed TensorRT-RTX accepts.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import onnx
from m3trt.build.library import PLUGIN_LIBRARY, import_library, load_plugins
from onnx import TensorProto, helper

if TYPE_CHECKING:
    import torch

ONE_RUN = os.environ.get("M3_RUNS") == "1"
"""Run each node once, eagerly: compute-sanitizer watches (tests/sanitize.sh)."""

REFERENCE_DEVICE = "cpu" if ONE_RUN else "cuda"
"""Where references may be computed: racecheck before 2026.4 crashes in many of cuBLAS's kernels."""

ELEMENT_TYPES = {
    "bf16": TensorProto.BFLOAT16,
    "f32": TensorProto.FLOAT,
    "e4m3": TensorProto.FLOAT8E4M3FN,
    "f16": TensorProto.FLOAT16,
    "int32": TensorProto.INT32,
}

DIMENSIONS = {
    "tokens": (0, 16, 8320),
    "requests": (0, 8, 64),
    "requests+1": (1, 9, 65),
    "max_pages": (1, 64, 1024),
    "pages": (1, 256, 4096),
    "decode_requests": (0, 8, 64),
    "q_len": (1, 1, 8),
}
"""Smallest, typical and largest value of every named dimension."""


@dataclass(frozen=True)
class Port:
    """An input or output: dtype by the short names of ELEMENT_TYPES, dims fixed or named."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Node:
    """An op, its attributes and ports; `aliases` pairs an output with the input it overwrites."""

    op_type: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    attributes: tuple[tuple[str, Any], ...]
    aliases: tuple[tuple[str, str], ...] = ()

    def but(self, **changed: Any) -> Node:
        """The same node with other attributes; None takes one away."""
        attributes = {**dict(self.attributes), **changed}
        kept = tuple((name, value) for name, value in attributes.items() if value is not None)
        return Node(self.op_type, self.inputs, self.outputs, kept, self.aliases)

    def retyped(self, **dtypes: str) -> Node:
        """The same node with other dtypes on the named ports."""

        def change(ports: tuple[Port, ...]) -> tuple[Port, ...]:
            return tuple(Port(p.name, dtypes.get(p.name, p.dtype), p.shape) for p in ports)

        return Node(
            self.op_type, change(self.inputs), change(self.outputs), self.attributes, self.aliases
        )

    def reshaped(self, **shapes: tuple[int | str, ...]) -> Node:
        """The same node with other shapes on the named inputs."""
        inputs = tuple(Port(p.name, p.dtype, shapes.get(p.name, p.shape)) for p in self.inputs)
        return Node(self.op_type, inputs, self.outputs, self.attributes, self.aliases)


class BuildError(RuntimeError):
    """The parser or the builder refused; the message is everything that was logged."""


def model(node: Node) -> onnx.ModelProto:
    def value(port: Port) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(port.name, ELEMENT_TYPES[port.dtype], list(port.shape))

    proto = helper.make_node(
        node.op_type,
        [port.name for port in node.inputs],
        [port.name for port in node.outputs],
        name=f"test.{node.op_type}",
        domain="m3",
        **dict(node.attributes),
    )
    graph = helper.make_graph(
        [proto], "one_op", [value(p) for p in node.inputs], [value(p) for p in node.outputs]
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("m3", 1)]
    return helper.make_model(graph, opset_imports=opsets)


@functools.cache
def _library() -> tuple[Any, Any, list[str]]:
    """TensorRT-RTX with the plugins loaded, its logger, and the list that the logger fills."""
    trt = import_library("tensorrt_rtx")
    messages: list[str] = []

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        def log(self, severity: Any, text: str) -> None:
            if severity <= trt.ILogger.Severity.WARNING:
                messages.append(text)

    if not PLUGIN_LIBRARY.exists():
        raise FileNotFoundError(f"{PLUGIN_LIBRARY} is missing: run `make plugins`")
    load_plugins("tensorrt_rtx", PLUGIN_LIBRARY)
    return trt, Logger(), messages


@functools.cache
def build(node: Node) -> Any:
    """The serialised engine of a node.

    Raises:
        BuildError: with the sentences that the plugin, the parser and the builder logged.
    """
    trt, logger, messages = _library()
    messages.clear()
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(model(node).SerializeToString()):
        errors = [str(parser.get_error(i)) for i in range(parser.num_errors)]
        raise BuildError("\n".join(messages + errors))
    config = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    profile = builder.create_optimization_profile()
    for port in node.inputs:
        if any(isinstance(dim, str) for dim in port.shape):
            ranges = [DIMENSIONS[d] if isinstance(d, str) else (d, d, d) for d in port.shape]
            profile.set_shape(port.name, *(tuple(r[i] for r in ranges) for i in range(3)))
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise BuildError("\n".join(messages))
    return engine


def gpu_missing() -> str:
    """Why nothing can run here; empty where there is a GPU."""
    import torch

    return "" if torch.cuda.is_available() else "no GPU on this machine"


@functools.cache
def _engine(node: Node) -> Any:
    trt, logger, messages = _library()
    engine = trt.Runtime(logger).deserialize_cuda_engine(build(node))
    if engine is None:
        raise RuntimeError("the engine cannot be loaded here: " + "\n".join(messages))
    return engine


def run(node: Node, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs of the node, on the CPU.

    Runs three times eagerly and once as a captured CUDA graph, each time from the same caches and
    over poisoned outputs, and raises AssertionError unless all results are the same bits. With
    `ONE_RUN` it runs once, eagerly.
    """
    import torch

    types = {"bf16": torch.bfloat16, "f32": torch.float32, "e4m3": torch.float8_e4m3fn}
    types["int32"] = torch.int32
    given = {port.name: inputs[port.name].cuda().contiguous() for port in node.inputs}
    for port in node.inputs:
        assert given[port.name].dtype == types[port.dtype], f"{port.name} is not {port.dtype}"
    aliases = dict(node.aliases)
    context = _engine(node).create_execution_context()
    nothing = torch.zeros(256, dtype=torch.uint8, device="cuda")  # the address of empty tensors

    def bind(name: str, tensor: torch.Tensor) -> None:
        assert context.set_tensor_address(name, tensor.data_ptr() or nothing.data_ptr()), name

    bound = {name: tensor.clone() for name, tensor in given.items()}
    for name, tensor in bound.items():
        assert context.set_input_shape(name, tuple(tensor.shape)), name
        bind(name, tensor)
    outputs = {}
    for port in node.outputs:
        shape = tuple(context.get_tensor_shape(port.name))
        fresh = torch.empty(shape, dtype=types[port.dtype], device="cuda")
        outputs[port.name] = bound[aliases[port.name]] if port.name in aliases else fresh
        bind(port.name, outputs[port.name])
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def execute() -> None:
        assert context.execute_async_v3(stream.cuda_stream), f"{node.op_type} failed"

    def result_of(step: Any) -> dict[str, torch.Tensor]:
        for port in node.outputs:
            if port.name in aliases:
                outputs[port.name].copy_(given[aliases[port.name]])
            else:  # all ones is NaN as a float, this pattern no block id
                outputs[port.name].view(torch.uint8).fill_(0x7B if port.dtype == "int32" else 0xFF)
        torch.cuda.synchronize()
        step()
        torch.cuda.synchronize()
        return {name: tensor.cpu() for name, tensor in outputs.items()}

    first = result_of(execute)
    if ONE_RUN:
        return first
    graph = torch.cuda.CUDAGraph()
    again = [result_of(execute), result_of(execute)]
    # NCCL has threads of its own that may use the GPU meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        execute()
    again.append(result_of(graph.replay))
    for attempt, result in enumerate(again):
        for name, tensor in first.items():
            assert same_bits(tensor, result[name]), f"{name} differs in run {attempt + 2} of 4"
    for name, tensor in given.items():
        untouched = name in aliases.values() or same_bits(tensor, bound[name])
        assert untouched, f"input {name} was overwritten"
    return first


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality, in which a NaN equals itself."""
    import torch

    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.contiguous().reshape(-1), b.contiguous().reshape(-1)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
