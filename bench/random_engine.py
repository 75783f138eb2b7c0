"""Engines of real shapes with random weights, made on the GPU: no checkpoint is needed.

One rank of a tensor-parallel model runs alone here: its collectives are taken out of the graph, so
its logits mean nothing and its time lacks theirs.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import onnx
from m3trt.build import tensors
from m3trt.build.builder import BuildReport, EngineTask, build_engine
from m3trt.build.configuration import BuildConfig
from m3trt.build.library import PLUGIN_LIBRARY
from m3trt.build.network import build_text_network
from m3trt.build.profiles import check_sizes, input_ranges, text_dimensions
from m3trt.convert.configuration import M3Config
from m3trt.runtime.bindings import cache_names
from m3trt.runtime.tensorrt.device_engine import DeviceEngine
from m3trt.runtime.tensorrt.memory import import_torch
from m3trt.runtime.tensorrt.step_context import Binding

COLLECTIVES = ("M3AllReduce", "M3AllGather")


def drop_collectives(model: onnx.ModelProto, vocab_size: int) -> None:
    """Let every collective's input stand for its output, in place; the logits become those of one
    rank, `vocab_size` wide."""
    graph = model.graph
    dropped = [node for node in graph.node if node.op_type in COLLECTIVES]
    renamed = {node.input[0]: node.output[0] for node in dropped}
    for node in dropped:
        graph.node.remove(node)
    for node in graph.node:
        node.output[:] = [renamed.get(name, name) for name in node.output]
    for value in [value for value in graph.value_info if value.name in renamed]:
        graph.value_info.remove(value)
    logits = next(value for value in graph.output if value.name == tensors.LOGITS)
    logits.type.tensor_type.shape.dim[1].dim_value = vocab_size


def build(config: M3Config, limits: BuildConfig, library: str, folder: Path) -> BuildReport:
    """Write `folder`/rank0.engine for this machine's GPU.

    Raises:
        ConfigError, BuildError, LibraryError: as the build command.
    """
    model, dimensions = build_text_network(config, limits, 0), text_dimensions(config, limits)
    drop_collectives(model, config.local_vocab_size)
    check_sizes(model, dimensions)
    path = folder / "rank0.onnx"
    onnx.save(model, path)
    task = EngineTask(
        name="rank0",
        library=library,
        onnx=path,
        engine=path.with_suffix(".engine"),
        ranges=input_ranges(model, dimensions),
        plugin_library=PLUGIN_LIBRARY,
        compute_capabilities=None,
        timing_cache=None,
        verbose=False,
    )
    return build_engine(task)


def load(path: Path, config: M3Config, library: str, pages: int, seed: int = 0) -> DeviceEngine:
    """The engine with random weights and caches: activations, scores and router logits of a
    standard deviation near 1, as behind a norm."""
    torch = import_torch()
    engine = DeviceEngine(path, library, PLUGIN_LIBRARY)
    generator = torch.Generator("cuda").manual_seed(seed)
    for name, (dtype, shape) in engine.inputs.items():
        if tensors.is_weight(name):
            kind = torch.float32 if dtype.itemsize == 4 else torch.bfloat16
            memory = torch.empty(shape, dtype=kind, device="cuda")
            engine.bind(name, Binding(shape, fill(name, memory, generator)))
    for name in cache_names(config):
        shape = (pages, *engine.inputs[name][1][1:])
        memory = torch.empty(shape, dtype=getattr(torch, config.dtype), device="cuda")
        memory.normal_(generator=generator)
        engine.bind(name, Binding(shape, memory, tensors.updated(name)))
    torch.cuda.synchronize()
    return engine


def fill(name: str, memory: Any, generator: Any) -> Any:
    """Random values for a weight: norms around 1, biases near 0, products of variance 1."""
    if name.endswith("norm.weight") or name.endswith("ln_f.weight"):
        return memory.normal_(1.0, 0.1, generator=generator)
    if name.endswith("bias"):
        return memory.normal_(0.0, 0.1, generator=generator)
    scale = 1.0 if "embedding" in name else memory.shape[-1] ** -0.5
    return memory.normal_(0.0, scale, generator=generator)


def page_bytes(config: M3Config) -> int:
    """Bytes of one page of all caches of one rank, in the model's dtype."""
    block, sparse = config.tokens_per_block, config.sparse_attention
    item = 2 if config.dtype == "bfloat16" else 4
    kv = config.num_hidden_layers * 2 * config.local_num_key_value_heads * config.head_size
    index = sum(config.sparse_layers) * sparse.index_head_size
    return block * (kv + index) * item


def weight_bytes(engine: DeviceEngine) -> int:
    return sum(
        math.prod(shape) * dtype.itemsize
        for name, (dtype, shape) in engine.inputs.items()
        if tensors.is_weight(name)
    )
