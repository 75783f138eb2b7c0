"""Chooses and makes the executor of an engine directory."""

from __future__ import annotations

import importlib.util
import logging

from m3trt.build.engine_dir import EngineDir, EngineDirError
from m3trt.build.library import RUNTIMES, device_compute_capability
from m3trt.runtime.step import StepExecutor, VisionExecutor

logger = logging.getLogger(__name__)


def create_executor(
    engine: EngineDir, runtime: str = "auto", num_pages: int | None = None
) -> StepExecutor:
    """The executor of the text engine, weights bound and caches allocated.

    Args:
        runtime: "auto", or one of `build.library.RUNTIMES`.
        num_pages: pages of each cache; by default those of max_batch_size sequences of
            max_seq_len. A GPU gets no more than fit; the executor's `num_pages` tells.

    Raises:
        EngineDirError: the engine does not fit this machine.
        WeightFileError: the weights do not fit the engine.
        ValueError: `runtime` or `num_pages` is out of range.
    """
    name = choose_runtime(engine, runtime)
    most = engine.build.max_pages
    if num_pages is None:
        full = engine.build.max_batch_size * engine.build.max_pages_per_sequence(engine.config)
        num_pages = min(full, most)
    if not 1 <= num_pages <= most:
        raise ValueError(f"num_pages is {num_pages}, the engine was built for 1 to {most}")
    if name == "reference":
        from m3trt.runtime.reference.executor import ReferenceExecutor

        return ReferenceExecutor(engine, num_pages)
    if engine.config.tp_size > 1:
        from m3trt.runtime.tensorrt.tensor_parallel import TensorParallelExecutor

        return TensorParallelExecutor(engine, name, num_pages)
    from m3trt.runtime.tensorrt.executor import TensorRTExecutor

    return TensorRTExecutor(engine, name, num_pages)


def create_vision_executor(engine: EngineDir, runtime: str = "auto") -> VisionExecutor:
    """The executor of the vision engine, weights bound; arguments and errors as above.

    Raises:
        ValueError: the model has no vision tower.
    """
    if engine.config.vision is None:
        raise ValueError(f"{engine.path}: the model has no vision tower")
    name = choose_runtime(engine, runtime)
    if name == "reference":
        from m3trt.runtime.reference.executor import ReferenceVisionExecutor

        return ReferenceVisionExecutor(engine)
    from m3trt.runtime.tensorrt.executor import TensorRTVisionExecutor

    return TensorRTVisionExecutor(engine, name)


def choose_runtime(engine: EngineDir, runtime: str = "auto") -> str:
    """Resolve "auto" to the engine's own library where it can run, else to "reference".

    Raises:
        EngineDirError: the engine was built with something else than what is here.
        ValueError: `runtime` is unknown.
    """
    if runtime not in ("auto", *RUNTIMES):
        raise ValueError(f"runtime {runtime!r} is unknown, expected auto or one of {RUNTIMES}")
    if runtime == "auto":
        obstacle = _obstacle(engine)
        runtime = engine.environment.library if obstacle is None else "reference"
        reason = obstacle or "the engines were built for it and for this GPU"
        logger.info("runtime %s: %s", runtime, reason)
    elif runtime != "reference" and _obstacle(engine) is not None:
        raise EngineDirError(f"{engine.path} cannot run with {runtime}: {_obstacle(engine)}")
    engine.check_environment(runtime)
    return runtime


def _obstacle(engine: EngineDir) -> str | None:
    """Why no compiled engine can run here, if so. Version conflicts are errors, not obstacles:
    on a machine with the right GPU nobody wants the reference executor unasked."""
    if engine.environment.library == "reference":
        return "the directory holds no compiled engines"
    device = device_compute_capability()
    if device is None:
        return "this machine has no GPU"
    targets = engine.environment.compute_capabilities
    if device not in targets:
        return f"the engines are for compute capabilities {targets}, the GPU has {device}"
    if importlib.util.find_spec("torch") is None:
        return "torch, which holds the GPU's memory, is not installed"
    return None
