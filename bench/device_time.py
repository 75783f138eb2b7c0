"""Time on the GPU: medians of replayed graphs, and how a step's time divides among its kernels."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from m3trt.runtime.tensorrt.memory import import_torch

READ_BYTES = 4.69e12
"""Bytes a second that one H200 reads, measured."""

COPY_BYTES = 4.2e12
"""Bytes a second that it copies, read and written together, measured."""

FLOPS = 703e12
"""bf16 matrix operations a second that it sustains, measured."""

L2_BYTES = 60e6

KERNELS = (
    ("AllReduce", r"nccl\w*AllReduce"),
    ("AllGather", r"nccl\w*AllGather|interleave_ranks"),
    (
        "SparseAttention",
        r"sparse_attention|(selected|page)_decode|SparsePrefill|Invert|MergeParams",
    ),
    ("PagedAttention", r"paged_attention|PagedDecode|PagedPrefill"),
    ("BlockSelect", r"BlockSelect"),
    ("CacheUpdate", r"cache_update"),
    ("AddRmsNorm", r"add_rms_norm"),
    ("Embedding", r"m3.*embedding_kernel"),
    ("MoE", r"moe|expert|router|swiglu_kernel|permute|GroupProblemShape|combine"),
    ("Gemm", r"nvjet|gemm|gemv|cublas|splitK|cutlass"),
)
"""Ops by the names of their kernels, the first that matches; everything else is TensorRT's."""


def op_of(kernel: str) -> str:
    return next((op for op, names in KERNELS if re.search(names, kernel)), "TensorRT")


def median_seconds(run: Callable[[], Any], stream: Any, runs: int) -> float:
    """Median device seconds of `run`, which only launches work on `stream`."""
    torch = import_torch()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
    with torch.cuda.stream(stream):
        for begin, end in pairs:
            begin.record()
            run()
            end.record()
    stream.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in pairs)) / 1e3


def graph_of(runs: Sequence[Callable[[], Any]], stream: Any) -> Any:
    """All `runs` once for warmth, then one after another as one CUDA graph."""
    torch = import_torch()
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for run in runs:
            run()
    return graph


def breakdown(run: Callable[[], Any]) -> dict[str, dict[str, float]]:
    """Seconds and launches of each op's kernels in one `run`, the largest first."""
    torch = import_torch()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    ops: dict[str, dict[str, float]] = {}
    for event in profile.key_averages():
        if event.key.startswith(("Memcpy", "Memset", "cuda")):
            continue
        op = ops.setdefault(op_of(event.key), {"seconds": 0.0, "launches": 0})
        op["seconds"] += event.self_device_time_total / 1e6
        op["launches"] += event.count
    return dict(sorted(ops.items(), key=lambda item: -item[1]["seconds"]))
