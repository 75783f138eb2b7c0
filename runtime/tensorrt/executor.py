"""Step and vision executors that run compiled engines on one GPU."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from m3trt.build import tensors
from m3trt.build.engine_dir import EngineDir
from m3trt.build.library import PLUGIN_LIBRARY
from m3trt.runtime.bindings import CACHE_SCALE, cache_names, scale_names, step_arrays
from m3trt.runtime.decode_padding import (
    decode_sizes,
    is_decode_step,
    no_requests,
    pad_decode,
    padded_requests,
)
from m3trt.runtime.step import Int32, StepInputs
from m3trt.runtime.tensorrt.device_engine import DeviceEngine
from m3trt.runtime.tensorrt.memory import import_torch
from m3trt.runtime.tensorrt.step_context import DeviceError

logger = logging.getLogger(__name__)

CACHE_SHARE = 0.9
"""Part of the GPU memory left by weights and engine that the caches may take."""


class TensorRTExecutor:
    """Runs one rank's engine on the current GPU. The caches start as zeros.

    Decode steps are padded to few batch sizes and run as CUDA graphs, steps with context eagerly.

    Args:
        library: "tensorrt" or "tensorrt_rtx", as the engine was built with.
        num_pages: pages of each cache; at most as many as the GPU's memory holds.
        rank: which of the engine's ranks.
        agree: makes of the pages that fit here those that all ranks take. From its return on every
            rank must take part in every step, also in those that are captured here.

    Raises:
        DeviceError: the engine cannot be loaded, or no page fits.
        WeightFileError: the weights do not fit the engine.
    """

    def __init__(
        self,
        engine: EngineDir,
        library: str,
        num_pages: int,
        plugin_library: Path = PLUGIN_LIBRARY,
        rank: int = 0,
        agree: Callable[[int], int] = lambda pages: pages,
    ) -> None:
        self._max_requests = engine.build.max_batch_size
        self._max_pages = engine.build.max_pages_per_sequence(engine.config)
        self._engine = DeviceEngine(engine.engine(rank), library, plugin_library)
        self._engine.bind_weights(engine.weights(rank))
        caches = {name: self._engine.inputs[name] for name in cache_names(engine.config)}
        page_bytes = sum(math.prod(shape[1:]) * dtype.itemsize for dtype, shape in caches.values())
        self.num_pages = agree(min(num_pages, _pages_that_fit(page_bytes)))
        for name, (_, shape) in caches.items():
            self._engine.bind_zeros(name, (self.num_pages, *shape[1:]), tensors.updated(name))
        for name in self._engine.inputs.keys() & set(scale_names(engine.config)):
            self._engine.bind_array(name, np.array([CACHE_SCALE], np.float32))
        self._capture()

    def _capture(self) -> None:
        """Capture every batch size now: a second each for 60 layers, which no request should
        wait for."""
        dtype, (_, hidden_size) = self._engine.inputs[tensors.PROMPT_EMBEDDING_TABLE]
        nobody = no_requests(hidden_size, dtype)
        start = time.monotonic()
        sizes = decode_sizes(self._max_requests)
        for size in sizes:
            step = pad_decode(nobody, size, self._max_pages)
            self._engine.run_captured(step_arrays(step), tensors.LOGITS)
        logger.info("decode of %s requests captured in %.1f s", sizes, time.monotonic() - start)

    def step(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """Run one step and return logits fp32 [n, vocab_size]; see `DeviceEngine.run`."""
        if not is_decode_step(inputs):
            return self._engine.run(step_arrays(inputs), tensors.LOGITS)
        logits = self._engine.run_captured(step_arrays(self.padded(inputs)), tensors.LOGITS)
        return logits[: inputs.logit_rows.size]

    def padded(self, inputs: StepInputs) -> StepInputs:
        """The decode step as it is captured."""
        requests = padded_requests(inputs.sequence_length.size, self._max_requests)
        return pad_decode(inputs, requests, self._max_pages)

    def close(self) -> None:
        self._engine.close()


def _pages_that_fit(page_bytes: int) -> int:
    torch = import_torch()
    free = torch.cuda.mem_get_info()[0]
    pages = int(free * CACHE_SHARE) // page_bytes
    if pages < 1:
        raise DeviceError(
            f"{free / 1e9:.2f} GB of GPU memory are left after the weights, one page of all caches"
            f" needs {page_bytes / 1e6:.1f} MB: use a larger GPU"
        )
    logger.info("%d pages of %.2f MB fit into the GPU's memory", pages, page_bytes / 1e6)
    return pages


class TensorRTVisionExecutor:
    """Runs `vision.engine` on the current GPU.

    Raises:
        DeviceError: the engine cannot be loaded.
        WeightFileError: the weights do not fit the engine.
    """

    def __init__(
        self, engine: EngineDir, library: str, plugin_library: Path = PLUGIN_LIBRARY
    ) -> None:
        self._engine = DeviceEngine(engine.vision_engine, library, plugin_library)
        self._engine.bind_weights(engine.vision_weights)

    def encode(
        self, patches: npt.NDArray[Any], positions: Int32, cu_seqlens: Int32
    ) -> npt.NDArray[Any]:
        """See `VisionExecutor.encode` and `DeviceEngine.run`."""
        feeds = {
            tensors.PATCHES: patches,
            tensors.POSITIONS: positions,
            tensors.CU_SEQLENS: cu_seqlens,
        }
        return self._engine.run(feeds, tensors.FEATURES)

    def close(self) -> None:
        self._engine.close()
