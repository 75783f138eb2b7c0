"""Compiles one ONNX graph into a TensorRT engine.

One optimisation profile covers prefill and decode. The plugins choose their kernels from the
shapes of each step, and what is left to TensorRT is pointwise work, gathers and norms, for which
it has one kernel whatever the batch: a second profile would buy nothing, but every profile needs
execution contexts of its own, and a step that mixes both phases fits neither.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from m3trt.build.graph import PLUGIN_DOMAIN
from m3trt.build.library import import_library, load_plugins
from m3trt.build.profiles import ShapeRange
from m3trt.build.progress import ProgressReport, progress_monitor
from m3trt.build.separate_inputs import original, separate_inputs

logger = logging.getLogger(__name__)


class BuildError(RuntimeError):
    """TensorRT refused a graph; the message holds what it said."""


@dataclass(frozen=True, slots=True)
class EngineTask:
    """Everything that one build needs, so that it can run in a process of its own."""

    name: str
    library: str
    onnx: Path
    engine: Path
    ranges: Mapping[str, ShapeRange]
    plugin_library: Path
    compute_capabilities: tuple[int, ...] | None
    """Targets of TensorRT-RTX; None: the GPU of this machine."""
    timing_cache: Path | None
    """A timing cache to start from, where the library has them."""
    verbose: bool


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What one build took; `peak_bytes` is the peak resident memory of its process."""

    seconds: float
    peak_bytes: int
    engine_bytes: int


def build_engine(task: EngineTask) -> BuildReport:
    """Parse `task.onnx` and write `task.engine`, plus its timing cache where the library has one.

    Raises:
        BuildError: TensorRT refuses the graph, the plugins or the configuration.
        LibraryError: the library or the plugins cannot be loaded.
    """
    start = time.monotonic()
    trt = import_library(task.library)
    messages: list[str] = []
    log = _logger(trt, task.verbose, messages)
    registry = load_plugins(task.library, task.plugin_library)
    model = onnx.load(task.onnx)
    _check_creators(registry, model, task)
    separate_inputs(model)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse(model.SerializeToString()):
        errors = [str(parser.get_error(i)) for i in range(parser.num_errors)]
        reasons = "; ".join(messages[:1] + errors)  # a plugin's own reason comes first
        raise BuildError(f"{task.onnx.name}: {task.library} refuses the graph: {reasons}")
    config = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    _set_compute_capabilities(trt, config, task.compute_capabilities)
    profile = builder.create_optimization_profile()
    for value in model.graph.input:
        if shapes := task.ranges.get(original(value.name)):
            profile.set_shape(value.name, *shapes)
    config.add_optimization_profile(profile)
    cache = _timing_cache(trt, config, task)
    with ProgressReport(task.name) as report:
        config.progress_monitor = progress_monitor(trt, report)
        engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise BuildError(f"{task.onnx.name}: {task.library} built no engine: {_last(messages)}")
    task.engine.write_bytes(memoryview(engine))
    if cache is not None:
        task.engine.with_suffix(".cache").write_bytes(memoryview(cache.serialize()))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return BuildReport(time.monotonic() - start, peak, engine.nbytes)


def _logger(trt: Any, verbose: bool, messages: list[str]) -> Any:
    """Sends TensorRT's messages to `logging` and keeps warnings and errors in `messages`."""
    levels = {
        trt.ILogger.INTERNAL_ERROR: logging.ERROR,
        trt.ILogger.ERROR: logging.ERROR,
        trt.ILogger.WARNING: logging.WARNING,
        trt.ILogger.INFO: logging.DEBUG,
        trt.ILogger.VERBOSE: logging.DEBUG,
    }

    class Forward(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            level = levels[severity]
            if level >= logging.WARNING:
                messages.append(message)
            if level > logging.DEBUG or verbose:
                logger.log(level, "%s", message)

    return Forward()


def _last(messages: list[str]) -> str:
    return "; ".join(messages[-3:]) or "it gave no reason; --log_level verbose shows more"


def _check_creators(registry: Any, model: onnx.ModelProto, task: EngineTask) -> None:
    """Every op of domain m3 needs a plugin of that name, version 1, in the empty namespace."""
    ops = {node.op_type for node in model.graph.node if node.domain == PLUGIN_DOMAIN}
    missing = sorted(op for op in ops if registry.get_creator(op, "1", "") is None)
    if missing:
        raise BuildError(
            f"{task.plugin_library} has no plugin {', '.join(missing)} of version 1, which"
            f" {task.onnx.name} needs: run `make plugins` again"
        )


def _set_compute_capabilities(trt: Any, config: Any, targets: tuple[int, ...] | None) -> None:
    """TensorRT-RTX takes a list of targets; TensorRT always builds for the GPU at hand."""
    if not hasattr(config, "num_compute_capabilities"):
        return
    known = trt.ComputeCapability.__members__
    names = ["CURRENT"] if targets is None else [f"SM{target}" for target in targets]
    if unknown := [name for name in names if name not in known]:
        expected = [name for name in known if name.startswith("SM")]
        raise BuildError(f"compute capabilities {unknown} are unknown, expected some of {expected}")
    config.num_compute_capabilities = len(names)
    for index, name in enumerate(names):
        if not config.set_compute_capability(known[name], index):
            raise BuildError(f"compute capability {name} was refused")


def _timing_cache(trt: Any, config: Any, task: EngineTask) -> Any:
    """TensorRT's timing cache; None in TensorRT-RTX, where it is a no-op: kernels are chosen at
    load, and the cache of those belongs to the runtime."""
    if task.library != "tensorrt":
        return None
    old = b"" if task.timing_cache is None else task.timing_cache.read_bytes()
    cache = config.create_timing_cache(old)
    if not config.set_timing_cache(cache, False):
        raise BuildError(f"{task.timing_cache} is not a timing cache of this TensorRT and GPU")
    return cache
