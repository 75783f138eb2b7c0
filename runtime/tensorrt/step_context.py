"""One execution context: bindings, a step run eagerly, and the same step as a CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from m3trt.runtime.bindings import check_size
from m3trt.runtime.tensorrt.memory import StagedBuffer, import_torch

DTYPES: Mapping[str, np.dtype[Any]] = {
    "FLOAT": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP8": np.dtype(ml_dtypes.float8_e4m3fn),
    "INT8": np.dtype(np.int8),
    "INT32": np.dtype(np.int32),
}
"""NumPy dtypes by the name of TensorRT's."""

Shapes = tuple[tuple[int, ...], ...]


class DeviceError(RuntimeError):
    """TensorRT refused to load or to run an engine."""


@dataclass(frozen=True, slots=True)
class Binding:
    """Device memory of a weight, cache or scale; `output` is the output that aliases a cache."""

    shape: tuple[int, ...]
    memory: Any
    output: str | None = None


class StepContext:
    """An execution context of `engine` on `stream`, with staging buffers of its own.

    `trt_context` may share its scratch memory with others: only one of them runs at a time.
    `inputs` are the engine's own names of every input of a step.
    """

    def __init__(
        self,
        name: str,
        engine: Any,
        trt_context: Any,
        stream: Any,
        inputs: Mapping[str, Sequence[str]],
    ) -> None:
        self._name = name
        self._engine = engine
        self._inputs = inputs
        self._context = trt_context
        self._stream = stream
        self._buffers: dict[str, StagedBuffer] = {}

    def bind(self, name: str, binding: Binding) -> None:
        """Bind memory that stays.

        Raises:
            ValueError: it is larger than TensorRT takes.
            DeviceError: its shape is outside the engine's profile.
        """
        check_size(name, binding.shape)
        address = binding.memory.data_ptr()
        self._set_input(name, binding.shape, address)
        if binding.output is not None:
            self._context.set_tensor_address(binding.output, address)

    def _set_input(self, name: str, shape: tuple[int, ...], address: int) -> None:
        for own in self._inputs[name]:
            if not self._context.set_input_shape(own, shape):
                raise DeviceError(
                    f"{self._name}: {name} {list(shape)} is outside the engine's profile"
                    f" {[list(s) for s in self._engine.get_tensor_profile_shape(own, 0)]}"
                )
            self._context.set_tensor_address(own, address)

    def run(self, feeds: Mapping[str, npt.NDArray[Any]], output: str) -> npt.NDArray[Any]:
        """Run a step of any shapes on the current stream; see `DeviceEngine.run`."""
        for name, array in feeds.items():
            check_size(name, array.shape)
            self._set_input(name, array.shape, self._stage(name, array))
        if missing := self._context.infer_shapes():
            raise DeviceError(f"{self._name}: inputs {missing} are not set")
        size = math.prod(self._context.get_tensor_shape(output)) * self._dtype(output).itemsize
        result = self._buffers.setdefault(output, StagedBuffer())
        self._context.set_tensor_address(output, result.reserve(size))
        self.enqueue()
        return self.read(output)

    def launch(self, outputs: Mapping[str, Any]) -> None:
        """Launch a step that writes into the device memory `outputs`."""
        for name, memory in outputs.items():
            self._context.set_tensor_address(name, memory.data_ptr())
        self.enqueue()

    def enqueue(self) -> None:
        """Launch the step with what is bound and staged."""
        if not self._context.execute_async_v3(self._stream.cuda_stream):
            raise DeviceError(f"{self._name}: the step failed, see the messages above")

    def stage(self, feeds: Mapping[str, npt.NDArray[Any]]) -> None:
        """Copy the arrays of a step that has the shapes of the last one."""
        for name, array in feeds.items():
            self._stage(name, array)

    def _stage(self, name: str, array: npt.NDArray[Any]) -> int:
        if array.dtype != self._dtype(name):
            raise TypeError(f"{name} is {array.dtype}, expected {self._dtype(name)}")
        return self._buffers.setdefault(name, StagedBuffer()).write(array)

    def read(self, output: str) -> npt.NDArray[Any]:
        """Wait for the step and return its output on the host."""
        shape, dtype = tuple(self._context.get_tensor_shape(output)), self._dtype(output)
        size = math.prod(shape) * dtype.itemsize
        return self._buffers[output].read(size).view(dtype).reshape(shape)

    def _dtype(self, name: str) -> np.dtype[Any]:
        own = self._inputs.get(name, (name,))[0]
        return DTYPES[self._engine.get_tensor_dtype(own).name]


class CapturedStep:
    """Steps of one set of shapes as a CUDA graph. It owns its context: TensorRT changes a context's
    memory with the shapes, under the feet of graphs that were captured with others.

    The first step runs eagerly, as TensorRT wants before a capture, and the graph is captured
    behind it; every later one is a replay.
    """

    def __init__(self, context: StepContext, stream: Any) -> None:
        self._context = context
        self._stream = stream
        self.graph: Any = None
        """The captured `torch.cuda.CUDAGraph`, None before the first step."""

    def run(self, feeds: Mapping[str, npt.NDArray[Any]], output: str) -> npt.NDArray[Any]:
        """Run a step on the current stream; see `DeviceEngine.run`."""
        if self.graph is None:
            result = self._context.run(feeds, output)
            self.graph = self._capture()
            return result
        self._context.stage(feeds)
        self.graph.replay()
        return self._context.read(output)

    def _capture(self) -> Any:
        torch = import_torch()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile: the vision engine has one of its own.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._context.enqueue()
        return graph
