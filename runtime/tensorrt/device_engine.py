"""One deserialised engine with its stream, the memory bound to it and its captured graphs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
from m3trt.build.library import import_library, load_plugins
from m3trt.build.separate_inputs import original
from m3trt.build.tensors import is_weight
from m3trt.runtime.bindings import check_size
from m3trt.runtime.tensorrt.memory import import_torch, upload
from m3trt.runtime.tensorrt.step_context import (
    DTYPES,
    Binding,
    CapturedStep,
    DeviceError,
    Shapes,
    StepContext,
)
from m3trt.runtime.weights import WeightFileError, find_weights, match_weights


class DeviceEngine:
    """Loads an engine file onto the current GPU. Weights, caches and scales are bound once; the
    arrays of a step pass through pinned memory.

    Raises:
        DeviceError: the engine cannot be loaded.
        LibraryError: the plugin library cannot be loaded.
    """

    def __init__(self, path: Path, library: str, plugin_library: Path) -> None:
        torch = import_torch()
        self._trt = import_library(library)
        self._path = path
        self._logger = self._trt.Logger(self._trt.Logger.WARNING)
        load_plugins(library, plugin_library)
        self._runtime = self._trt.Runtime(self._logger)
        self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise DeviceError(f"{library} cannot load {path}: its messages above say why")
        self.stream = torch.cuda.Stream()
        """The `torch.cuda.Stream` of all steps."""
        size = self._engine.device_memory_size_v2
        self._scratch = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
        self._config = self._runtime_config()
        self._names = self._input_names()
        self.inputs = {
            name: (
                DTYPES[self._engine.get_tensor_dtype(own).name],
                tuple(self._engine.get_tensor_shape(own)),
            )
            for name, (own, *_) in self._names.items()
        }
        """Dtype and shape of every input; a dynamic dimension is -1."""
        self._bound: dict[str, Binding] = {}
        self._eager: Any = self._new_context()
        self._graphs: dict[Shapes, CapturedStep] = {}

    def _input_names(self) -> dict[str, list[str]]:
        """The engine's names of every input of a step: one, or one for each op that reads it."""
        names: dict[str, list[str]] = {}
        for i in range(self._engine.num_io_tensors):
            name = self._engine.get_tensor_name(i)
            if self._engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT:
                names.setdefault(original(name), []).append(name)
        return names

    def _runtime_config(self) -> Any:
        """Contexts share their scratch memory. TensorRT-RTX would compile kernels for the shapes
        of a step behind its back and change to them, and with them the bits, at any moment."""
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(
            self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        if hasattr(config, "dynamic_shapes_kernel_specialization_strategy"):
            strategies = self._trt.DynamicShapesKernelSpecializationStrategy
            config.dynamic_shapes_kernel_specialization_strategy = strategies.NONE
        return config

    def _new_context(self) -> StepContext:
        context = self._engine.create_execution_context(self._config)
        if context is None:
            raise DeviceError(f"{self._path}: no execution context, most likely for lack of memory")
        context.set_device_memory(self._scratch.data_ptr(), self._scratch.numel())
        step = StepContext(self._path.name, self._engine, context, self.stream, self._names)
        for name, binding in self._bound.items():
            step.bind(name, binding)
        return step

    @property
    def scratch_bytes(self) -> int:
        """Device memory that steps need beside weights, caches and staging buffers."""
        return int(self._scratch.numel())

    def bind_weights(self, path: Path) -> None:
        """Stream a safetensors file, which must hold exactly the engine's weights, to the GPU.

        Raises:
            WeightFileError: names every tensor that is missing, unexpected or of another type; or
                the file cannot be read to its end.
            ValueError: a tensor is larger than TensorRT takes.
        """
        torch = import_torch()
        weights = find_weights(path)
        expected = {name: kind for name, kind in self.inputs.items() if is_weight(name)}
        match_weights(path, weights, expected)
        stored = list(weights.values())
        try:
            with torch.cuda.stream(self.stream):
                uploaded = upload(path, stored)
        except OSError as error:
            raise WeightFileError(f"{path} cannot be read: {error}") from error
        for tensor, memory in zip(stored, uploaded, strict=True):
            self.bind(tensor.name, Binding(tensor.shape, memory))

    def bind_zeros(self, name: str, shape: tuple[int, ...], output: str) -> None:
        """Allocate a cache of zeros for input `name` and for the output that aliases it.

        Raises:
            ValueError: the cache is larger than TensorRT takes.
        """
        torch = import_torch()
        check_size(name, shape)
        size = math.prod(shape) * self.inputs[name][0].itemsize
        with torch.cuda.stream(self.stream):  # steps must not start before it is zero
            memory = torch.zeros(size, dtype=torch.uint8, device="cuda")
        self.bind(name, Binding(shape, memory, output))

    def bind_array(self, name: str, array: npt.NDArray[Any]) -> None:
        """Copy a small array to the GPU for good."""
        torch = import_torch()
        with torch.cuda.stream(self.stream):
            memory = torch.from_numpy(array.copy()).cuda()
        self.bind(name, Binding(array.shape, memory))

    def bind(self, name: str, binding: Binding) -> None:
        """Bind device memory for good, before the first `run_captured`.

        Raises:
            ValueError: it is larger than TensorRT takes.
            DeviceError: its shape is outside the engine's profile.
        """
        self._eager.bind(name, binding)
        self._bound[name] = binding

    def run(self, feeds: Mapping[str, npt.NDArray[Any]], output: str) -> npt.NDArray[Any]:
        """Run one step and return one output on the host; waits for the GPU.

        Raises:
            DeviceError: a shape is outside the profile, an input is missing, or the GPU failed.
            TypeError: an array has another dtype than the engine.
            ValueError: an array is larger than TensorRT takes.
        """
        with import_torch().cuda.stream(self.stream):
            result: npt.NDArray[Any] = self._eager.run(feeds, output)
            return result

    def run_captured(self, feeds: Mapping[str, npt.NDArray[Any]], output: str) -> npt.NDArray[Any]:
        """`run` as a CUDA graph, captured for each set of shapes when it first comes: for steps
        of few different shapes. Gives the same bits.

        Raises:
            As `run`.
        """
        with import_torch().cuda.stream(self.stream):
            return self.captured(feeds).run(feeds, output)

    def launch(self, inputs: Mapping[str, Binding], outputs: Mapping[str, Any]) -> None:
        """Launch a step whose arrays are device memory already; does not wait for it.

        Raises:
            As `run`.
        """
        for name, binding in inputs.items():
            self._eager.bind(name, binding)
        self._eager.launch(outputs)

    def captured(self, feeds: Mapping[str, npt.NDArray[Any]]) -> CapturedStep:
        """The captured step that runs `feeds`."""
        shapes = tuple(array.shape for array in feeds.values())
        if shapes not in self._graphs:
            self._graphs[shapes] = CapturedStep(self._new_context(), self.stream)
        return self._graphs[shapes]

    def close(self) -> None:
        """Release the engine and all memory bound to it."""
        self.stream.synchronize()
        self._graphs.clear()
        self._eager = self._config = self._engine = self._runtime = self._scratch = None
        self._bound.clear()
