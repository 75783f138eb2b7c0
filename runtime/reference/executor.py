"""Step and vision executors that run the engine's own ONNX graphs on the CPU."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import numpy.typing as npt
from m3trt.build import tensors
from m3trt.build.engine_dir import EngineDir
from m3trt.runtime.bindings import CACHE_SCALE, cache_names, scale_names, step_arrays
from m3trt.runtime.reference.collectives import Communicator
from m3trt.runtime.reference.numerics import Array, Float32, Int32
from m3trt.runtime.reference.program import Program
from m3trt.runtime.step import StepInputs


class ReferenceExecutor:
    """Runs `rank{r}.onnx` of every rank, one thread a rank.

    Weights are mapped, not copied; each is up-cast to fp32 when it is first used. The caches start
    as zeros.

    Raises:
        WeightFileError: a rank's weights do not fit its graph.
    """

    def __init__(self, engine: EngineDir, num_pages: int) -> None:
        self.num_pages = num_pages
        ranks = range(engine.config.tp_size)
        self._communicator = Communicator(len(ranks))
        self._programs = [self._load(engine, rank) for rank in ranks]
        self._threads = ThreadPoolExecutor(len(ranks), "rank") if len(ranks) > 1 else None

    def _load(self, engine: EngineDir, rank: int) -> Program:
        config = engine.config
        program = Program(engine.onnx(rank), self._communicator, rank)
        program.bind_weights(engine.weights(rank))
        for name in cache_names(config):
            kind = program.inputs[name]
            program.bind(name, np.zeros(kind.with_sizes(pages=self.num_pages), kind.dtype))
        for name in program.inputs.keys() & set(scale_names(config)):
            program.bind(name, np.array([CACHE_SCALE], np.float32))
        return program

    def step(self, inputs: StepInputs) -> Float32:
        """Run one step on all ranks; logits are those of rank 0, which all ranks share.

        Raises:
            RuntimeError: the executor is closed.
            Exception: that of the first rank that failed. The other ranks are released, the caches
                may hold part of the step, and later steps work.
        """
        if not self._programs:
            raise RuntimeError("the executor is closed")
        feeds = step_arrays(inputs)
        if self._threads is None:
            return self._programs[0].run(tensors.LOGITS, feeds)
        futures = [
            self._threads.submit(self._run_rank, program, feeds) for program in self._programs
        ]
        wait(futures)
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            self._communicator.reset()
            own = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
            raise (own or errors)[0]
        return futures[0].result()

    def _run_rank(self, program: Program, feeds: dict[str, Array]) -> Array:
        try:
            return program.run(tensors.LOGITS, feeds)
        except BaseException:
            self._communicator.abort()
            raise

    def close(self) -> None:
        """Release weights, caches and threads."""
        self._programs = []
        if self._threads is not None:
            self._threads.shutdown()


class ReferenceVisionExecutor:
    """Runs `vision.onnx`.

    Raises:
        WeightFileError: the weights do not fit the graph.
    """

    def __init__(self, engine: EngineDir) -> None:
        program = Program(engine.vision_onnx, Communicator(1))
        program.bind_weights(engine.vision_weights)
        self._program: Program | None = program

    def encode(
        self, patches: npt.NDArray[Any], positions: Int32, cu_seqlens: Int32
    ) -> npt.NDArray[Any]:
        """See `VisionExecutor.encode`.

        Raises:
            RuntimeError: the executor is closed.
        """
        if self._program is None:
            raise RuntimeError("the executor is closed")
        return self._program.run(
            tensors.FEATURES,
            {
                tensors.PATCHES: patches,
                tensors.POSITIONS: positions,
                tensors.CU_SEQLENS: cu_seqlens,
            },
        )

    def close(self) -> None:
        self._program = None
