"""Engines of real shapes with random weights, made on the GPU: no checkpoint is needed.

One rank of a tensor-parallel model may run alone: then its collectives are taken out of the graph,
its logits mean nothing and its time lacks theirs.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from m3trt.build import tensors
from m3trt.build.builder import BuildReport, EngineTask, build_engine
from m3trt.build.configuration import BuildConfig
from m3trt.build.library import PLUGIN_LIBRARY
from m3trt.build.network import build_text_network
from m3trt.build.profiles import DimensionRange, check_sizes, input_ranges, text_dimensions
from m3trt.convert.configuration import M3Config
from m3trt.convert.layout import expert_stack, rank_tensors
from m3trt.runtime.bindings import cache_names
from m3trt.runtime.tensorrt.device_engine import DeviceEngine
from m3trt.runtime.tensorrt.memory import import_torch
from m3trt.runtime.tensorrt.step_context import Binding

ROUTER_BIAS = 0.001
"""Standard deviation of the experts' selection biases, the only biases of the text model."""

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


def build(
    config: M3Config, limits: BuildConfig, library: str, folder: Path, collectives: bool = False
) -> BuildReport:
    """Write `folder`/rank0.engine for this machine's GPU, which is any rank's.

    Raises:
        ConfigError, BuildError, LibraryError: as the build command.
    """
    model, dimensions = build_text_network(config, limits, 0), text_dimensions(config, limits)
    if not collectives:
        drop_collectives(model, config.local_vocab_size)
    return compile_graph(model, dimensions, library, folder / "rank0.engine")


def compile_graph(
    model: onnx.ModelProto, dimensions: Mapping[str, DimensionRange], library: str, engine: Path
) -> BuildReport:
    """Write `engine` for this machine's GPU, and the graph beside it.

    Raises:
        ConfigError, BuildError, LibraryError: as the build command.
    """
    check_sizes(model, dimensions)
    onnx.save(model, engine.with_suffix(".onnx"))
    task = EngineTask(
        name=engine.stem,
        library=library,
        onnx=engine.with_suffix(".onnx"),
        engine=engine,
        ranges=input_ranges(model, dimensions),
        plugin_library=PLUGIN_LIBRARY,
        compute_capabilities=None,
        timing_cache=None,
        verbose=False,
    )
    return build_engine(task)


def load(
    path: Path,
    config: M3Config,
    library: str,
    pages: int,
    rank: int = 0,
    whole: M3Config | None = None,
) -> DeviceEngine:
    """The engine with random weights and caches: activations, scores and router logits of a
    standard deviation near 1, as behind a norm. With `whole`, the config at TP 1, they are this
    rank's part of those that one rank would get."""
    torch = import_torch()
    engine = DeviceEngine(path, library, PLUGIN_LIBRARY)
    for name, (dtype, shape) in engine.inputs.items():
        if tensors.is_weight(name):
            kind = torch.float32 if dtype.itemsize == 4 else torch.bfloat16
            if whole is None:
                memory = fill(name, torch.empty(shape, dtype=kind, device="cuda"))
            else:
                memory = rank_weight(name, kind, config, whole, rank)
            engine.bind(name, Binding(shape, memory))
    for name in cache_names(config):
        shape = (pages, *engine.inputs[name][1][1:])
        memory = rank_cache(name, shape, config, whole or config, rank)
        engine.bind(name, Binding(shape, memory, tensors.updated(name)))
    torch.cuda.synchronize()
    return engine


def fill(name: str, memory: Any) -> Any:
    """Random values for a tensor, always the same for its name: norms around 1, products of
    variance 1. Tokens choose experts as at random: where the best of 128 scores lie, the sigmoid's
    slope is 0.1, so a router bias of 0.1 would count for as much as the logits; and rows of what
    follows a SwiGLU have no sum, since its mean would add to all tokens the same."""
    generator = import_torch().Generator(memory.device).manual_seed(zlib.crc32(name.encode()))
    if "cache" in name:
        return memory.normal_(generator=generator)
    if name.endswith("norm.weight") or name.endswith("ln_f.weight"):
        return memory.normal_(1.0, 0.1, generator=generator)
    if name.endswith("bias"):
        return memory.normal_(0.0, ROUTER_BIAS, generator=generator)
    scale = 1.0 if "embedding" in name else memory.shape[-1] ** -0.5
    memory.normal_(0.0, scale, generator=generator)
    return memory.sub_(memory.mean(-1, keepdim=True)) if ".proj." in name else memory


def rank_weight(name: str, kind: Any, config: M3Config, whole: M3Config, rank: int) -> Any:
    """A rank's part of a weight; expert stacks may come in fewer parts than those of one rank."""
    torch, specs, names = import_torch(), rank_tensors(whole), [name]
    if found := re.fullmatch(r"(.*\.mlp\.(?:fc|proj))(?:\.part(\d+))?\.weight", name):
        stack, part = found[1], int(found[2] or 0)
        if len(rank_tensors(config)[name].shape) == 3:
            ratio = whole.expert_parts // config.expert_parts
            parts = range(part * ratio, (part + 1) * ratio)
            names = [expert_stack(stack, one, whole.expert_parts) for one in parts]
    pieces = []
    for one in names:
        full = fill(one, torch.empty(specs[one].shape, dtype=kind, device="cuda"))
        pieces.append(shard(one, full, config, rank).contiguous())
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def shard(name: str, full: Any, config: M3Config, rank: int) -> Any:
    """A rank's part of a weight, as `convert` cuts it; ranks must not outnumber the KV heads."""
    torch, size = import_torch(), config.tp_size
    if name.endswith("attention.qkv.weight"):
        return torch.cat([part.chunk(size)[rank] for part in _qkv_parts(full, config)])
    if name.endswith(("attention.dense.weight", "proj.weight")) or ".proj." in name:
        return full.chunk(size, dim=-1)[rank]
    if name == "lm_head.weight":
        return full.chunk(size)[rank]
    if ".fc." in name:  # gate and up apart
        halves = full.chunk(2, dim=-2)
        return torch.cat([half.chunk(size, dim=-2)[rank] for half in halves], dim=-2)
    return full


def _qkv_parts(full: Any, config: M3Config) -> list[Any]:
    """q, k, v and index q of all heads, and the index k, which every rank has, once for each."""
    head, kv = config.head_size, config.num_key_value_heads
    sizes = [config.num_attention_heads * head, kv * head, kv * head]
    if len(full) > sum(sizes):
        sizes += [kv * head, head]
    parts = list(full.split(sizes))
    if len(parts) == 5:
        parts[4] = parts[4].repeat(config.tp_size, 1)
    return parts


def rank_cache(
    name: str, shape: tuple[int, ...], config: M3Config, whole: M3Config, rank: int
) -> Any:
    """A rank's heads of a random cache."""
    torch = import_torch()
    heads = len(shape) == 5
    if heads:
        shape = (*shape[:3], whole.local_num_key_value_heads, shape[4])
    full = fill(name, torch.empty(shape, dtype=getattr(torch, config.dtype), device="cuda"))
    if not heads or whole is config:
        return full
    return full.chunk(config.tp_size, dim=3)[rank].contiguous()


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
