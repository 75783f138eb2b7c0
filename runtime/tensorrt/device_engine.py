"""One deserialised engine with its execution context, stream and bindings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from m3trt.build.library import import_library, load_plugins
from m3trt.build.tensors import is_weight
from m3trt.runtime.bindings import check_size
from m3trt.runtime.tensorrt.memory import StagedBuffer, Uploader, import_torch
from m3trt.runtime.weights import map_weights, match_weights

DTYPES: Mapping[str, np.dtype[Any]] = {
    "FLOAT": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP8": np.dtype(ml_dtypes.float8_e4m3fn),
    "INT8": np.dtype(np.int8),
    "INT32": np.dtype(np.int32),
}
"""NumPy dtypes by the name of TensorRT's."""


class DeviceError(RuntimeError):
    """TensorRT refused to load or to run an engine."""


class DeviceEngine:
    """Loads an engine file onto the current GPU. Weights, caches and scales are bound once; the
    arrays of a step pass through pinned memory.

    Raises:
        DeviceError: the engine cannot be loaded.
        LibraryError: the plugin library cannot be loaded.
    """

    def __init__(self, path: Path, library: str, plugin_library: Path) -> None:
        torch = import_torch()
        trt = import_library(library)
        self._path = path
        self._logger = trt.Logger(trt.Logger.WARNING)
        load_plugins(library, plugin_library)
        self._runtime = trt.Runtime(self._logger)
        self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise DeviceError(f"{library} cannot load {path}: its messages above say why")
        self._context = self._engine.create_execution_context()
        if self._context is None:
            raise DeviceError(f"{path}: no execution context, most likely for lack of GPU memory")
        self._stream = torch.cuda.Stream()
        self._bound: dict[str, Any] = {}
        self._buffers: dict[str, StagedBuffer] = {}
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        self.inputs = {
            name: (
                DTYPES[self._engine.get_tensor_dtype(name).name],
                tuple(self._engine.get_tensor_shape(name)),
            )
            for name in names
            if self._engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        }
        """Dtype and shape of every input; a dynamic dimension is -1."""

    def bind_weights(self, path: Path) -> None:
        """Stream a safetensors file, which must hold exactly the engine's weights, to the GPU.

        Raises:
            WeightFileError: names every tensor that is missing, unexpected or of another type.
            ValueError: a tensor is larger than TensorRT takes.
        """
        torch = import_torch()
        weights = map_weights(path)
        expected = {name: kind for name, kind in self.inputs.items() if is_weight(name)}
        match_weights(path, weights, expected)
        uploader = Uploader(sum(array.nbytes for array in weights.values()))
        with torch.cuda.stream(self._stream):
            for name, array in weights.items():
                self._bind(name, array.shape, uploader.upload(array))
            uploader.finish()

    def bind_zeros(self, name: str, shape: tuple[int, ...], output: str) -> None:
        """Allocate a cache of zeros for input `name` and for the output that aliases it.

        Raises:
            ValueError: the cache is larger than TensorRT takes.
        """
        torch = import_torch()
        check_size(name, shape)
        size = math.prod(shape) * self.inputs[name][0].itemsize
        with torch.cuda.stream(self._stream):  # steps must not start before it is zero
            memory = torch.zeros(size, dtype=torch.uint8, device="cuda")
        self._bind(name, shape, memory)
        self._context.set_tensor_address(output, memory.data_ptr())

    def bind_array(self, name: str, array: npt.NDArray[Any]) -> None:
        """Copy a small array to the GPU for good."""
        torch = import_torch()
        with torch.cuda.stream(self._stream):
            self._bind(name, array.shape, torch.from_numpy(array.copy()).cuda())

    def _bind(self, name: str, shape: tuple[int, ...], memory: Any) -> None:
        check_size(name, shape)
        self._bound[name] = memory
        self._set_input(name, shape, memory.data_ptr())

    def _set_input(self, name: str, shape: tuple[int, ...], address: int) -> None:
        if not self._context.set_input_shape(name, shape):
            raise DeviceError(
                f"{self._path.name}: {name} {list(shape)} is outside the engine's profile"
                f" {[list(s) for s in self._engine.get_tensor_profile_shape(name, 0)]}"
            )
        self._context.set_tensor_address(name, address)

    def run(self, feeds: Mapping[str, npt.NDArray[Any]], output: str) -> npt.NDArray[Any]:
        """Run one step and return one output on the host; waits for the GPU.

        Raises:
            DeviceError: a shape is outside the profile, an input is missing, or the GPU failed.
            TypeError: an array has another dtype than the engine.
        """
        torch = import_torch()
        with torch.cuda.stream(self._stream):
            for name, array in feeds.items():
                if array.dtype != self.inputs[name][0]:
                    raise TypeError(f"{name} is {array.dtype}, expected {self.inputs[name][0]}")
                buffer = self._buffers.setdefault(name, StagedBuffer())
                self._set_input(name, array.shape, buffer.write(array))
            if missing := self._context.infer_shapes():
                raise DeviceError(f"{self._path.name}: inputs {missing} are not set")
            shape = tuple(self._context.get_tensor_shape(output))
            dtype = DTYPES[self._engine.get_tensor_dtype(output).name]
            result = self._buffers.setdefault(output, StagedBuffer())
            size = math.prod(shape) * dtype.itemsize
            self._context.set_tensor_address(output, result.reserve(size))
            if not self._context.execute_async_v3(self._stream.cuda_stream):
                raise DeviceError(f"{self._path.name}: the step failed, see the messages above")
            return result.read(size).view(dtype).reshape(shape)

    def close(self) -> None:
        """Release the engine and all memory bound to it."""
        self._stream.synchronize()
        self._context = self._engine = self._runtime = None
        self._bound.clear()
        self._buffers.clear()
