"""A TensorRT and a torch that run on the CPU, so that bindings can be tested without a GPU.

The fake engine file is an ONNX file. The fake context knows of every tensor only its shape and its
address, reads and writes memory there, and lets ONNX's evaluator compute. While a graph is captured
it computes nothing; a replay computes with the addresses and shapes of then.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from m3trt.runtime.reference.gemm import M3Gemm
from m3trt.runtime.tensorrt import device_engine, executor, memory, step_context
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

LARGEST = 8
"""Rows up to which the fake profile goes."""

TYPES = {TensorProto.FLOAT: "FLOAT", TensorProto.BFLOAT16: "BF16", TensorProto.INT32: "INT32"}


class Accumulate(OpRun):
    """cache [P, 3] += sum over rows of x [n, 3], in place."""

    op_domain = "m3"

    def _run(self, cache: Any, x: Any) -> tuple[Any]:
        cache += x.sum(axis=0)
        return (cache,)


class Mode(enum.Enum):
    INPUT = 0
    OUTPUT = 1


class Engine:
    def __init__(self, content: bytes) -> None:
        self.model = onnx.load_from_string(content)
        graph = self.model.graph
        self.values = {x.name: x.type.tensor_type for x in [*graph.input, *graph.output]}
        self.inputs = {x.name for x in graph.input}
        self.num_io_tensors = len(self.values)

    def get_tensor_name(self, index: int) -> str:
        return list(self.values)[index]

    def get_tensor_dtype(self, name: str) -> Any:
        return types.SimpleNamespace(name=TYPES[self.values[name].elem_type])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(-1 if d.dim_param else d.dim_value for d in self.values[name].shape.dim)

    def get_tensor_mode(self, name: str) -> Mode:
        return Mode.INPUT if name in self.inputs else Mode.OUTPUT

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        return [
            tuple(size if d == -1 else d for d in self.get_tensor_shape(name))
            for size in (0, 1, LARGEST)
        ]

    device_memory_size_v2 = 1024

    def create_runtime_config(self) -> Any:
        return types.SimpleNamespace(
            set_execution_context_allocation_strategy=lambda strategy: None,
            dynamic_shapes_kernel_specialization_strategy=None,
        )

    def create_execution_context(self, config: Any) -> Context:
        return Context(self)


class Context:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_device_memory(self, address: int, size: int) -> None:
        assert address
        assert size >= self.engine.device_memory_size_v2

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        limits = self.engine.get_tensor_profile_shape(name, 0)[2]
        self.shapes[name] = shape
        return all(size <= most for size, most in zip(shape, limits, strict=True))

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address, f"null address for {name}"
        self.addresses[name] = address
        return True

    def infer_shapes(self) -> list[str]:
        return sorted(self.engine.inputs - self.shapes.keys())

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        sizes: dict[str, int] = {}
        for known, shape in self.shapes.items():
            dims = self.engine.values[known].shape.dim
            sizes |= {d.dim_param: s for d, s in zip(dims, shape, strict=True) if d.dim_param}
        return tuple(
            sizes[d.dim_param] if d.dim_param else d.dim_value
            for d in self.engine.values[name].shape.dim
        )

    def memory(self, name: str) -> Any:
        dtype = step_context.DTYPES[self.engine.get_tensor_dtype(name).name]
        shape = self.get_tensor_shape(name)
        size = int(np.prod(shape)) * dtype.itemsize
        raw = (ctypes.c_uint8 * size).from_address(self.addresses[name])
        return np.frombuffer(raw, dtype).reshape(shape)

    def execute_async_v3(self, stream: int) -> bool:
        if Graph.capturing is not None:
            Graph.capturing.steps.append((self, dict(self.shapes), dict(self.addresses)))
            return True
        feeds = {name: self.memory(name) for name in self.engine.inputs}
        evaluator = ReferenceEvaluator(self.engine.model, new_ops=[M3Gemm, Accumulate])
        results = evaluator.run(None, feeds)
        for name, value in zip(evaluator.output_names, results, strict=True):
            if name.endswith("_out"):
                assert self.addresses[name] == self.addresses[name.removesuffix("_out")]
            else:
                self.memory(name)[...] = value
        return True


class Graph:
    """A CUDA graph: what was enqueued while it was captured, and how often it was replayed."""

    capturing: Graph | None = None

    def __init__(self) -> None:
        self.steps: list[tuple[Context, dict[str, tuple[int, ...]], dict[str, int]]] = []
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for context, shapes, addresses in self.steps:
            context.shapes, context.addresses = dict(shapes), dict(addresses)
            assert context.execute_async_v3(0)


@contextlib.contextmanager
def capture(graph: Graph, **options: Any) -> Iterator[None]:
    assert not graph.steps
    Graph.capturing = graph
    try:
        yield
    finally:
        Graph.capturing = None


class Runtime:
    def __init__(self, logger: Any) -> None: ...

    def deserialize_cuda_engine(self, content: bytes) -> Engine | None:
        return Engine(content) if content else None


class Stream:
    cuda_stream = 0

    def synchronize(self) -> None: ...


class Event:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    def empty(size: int, **options: Any) -> Any:
        """Device and pinned memory are ordinary memory, and hold rubbish at first."""
        return torch.full((size,), 0xA5, dtype=options["dtype"])

    logger = type("Logger", (), {"WARNING": 1, "__init__": lambda self, level: None})
    strategies = types.SimpleNamespace(USER_MANAGED=0, NONE=0)
    trt = types.SimpleNamespace(
        Logger=logger,
        Runtime=Runtime,
        TensorIOMode=Mode,
        ExecutionContextAllocationStrategy=strategies,
        DynamicShapesKernelSpecializationStrategy=strategies,
    )
    fake_torch = types.SimpleNamespace(
        empty=empty,
        zeros=lambda size, **options: torch.zeros(size, dtype=options["dtype"]),
        from_numpy=lambda x: types.SimpleNamespace(cuda=lambda: torch.from_numpy(x)),
        uint8=torch.uint8,
        cuda=types.SimpleNamespace(
            Stream=Stream,
            Event=Event,
            stream=lambda stream: contextlib.nullcontext(),
            current_stream=Stream,
            CUDAGraph=Graph,
            graph=capture,
            mem_get_info=lambda: (1000, 2000),
        ),
    )
    monkeypatch.setattr(device_engine, "import_library", lambda name: trt)
    monkeypatch.setattr(device_engine, "load_plugins", lambda name, path: None)
    for module in (memory, device_engine, step_context, executor):
        monkeypatch.setattr(module, "import_torch", lambda: fake_torch)


@pytest.fixture
def engine_file(tmp_path: Path) -> Callable[[], Path]:
    """y [n, 2] = x [n, 3] times layer.weight [2, 3]; the cache sums up all rows of x."""

    def make() -> Path:
        value = helper.make_tensor_value_info
        graph = helper.make_graph(
            [
                helper.make_node("Accumulate", ["cache", "x"], ["cache_out"], domain="m3"),
                helper.make_node(
                    "M3Gemm",
                    ["x", "layer.weight"],
                    ["y"],
                    domain="m3",
                    has_bias=0,
                    epilogue="none",
                    output_dtype="same",
                ),
            ],
            "small",
            [
                value("x", TensorProto.FLOAT, ["n", 3]),
                value("layer.weight", TensorProto.FLOAT, [2, 3]),
                value("cache", TensorProto.FLOAT, ["pages", 3]),
            ],
            [
                value("y", TensorProto.FLOAT, ["n", 2]),
                value("cache_out", TensorProto.FLOAT, ["pages", 3]),
            ],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("m3", 1)])
        path = tmp_path / "rank0.engine"
        path.write_bytes(model.SerializeToString())
        return path

    return make
