"""Time on the GPU: medians of replayed graphs, and how a step's time divides among its kernels."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from m3trt.runtime.tensorrt.memory import import_torch

READ_BYTES = 4.69e12
"""Bytes a second that one H200 reads, measured."""

COPY_BYTES = 4.2e12
"""Bytes a second that it copies, read and written together, measured."""

FLOPS = 703e12
"""bf16 matrix operations a second that it sustains, measured."""

LINK_BYTES = 450e9
"""Bytes a second that NVLink 4 carries in each direction between two GPUs, by its data sheet."""

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


class Kernel(NamedTuple):
    """When a kernel ran, in microseconds."""

    name: str
    begin: float
    end: float


def breakdown(run: Callable[[], Any]) -> dict[str, dict[str, float]]:
    """What each op's kernels take in one `run`; see `divide`."""
    torch = import_torch()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return divide(
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Memcpy", "Memset", "cuda"))
    )


def divide(kernels: Iterable[Kernel]) -> dict[str, dict[str, float]]:
    """Each op's `seconds`, `added_seconds` and launches, the largest first. A kernel that was
    launched programmatically starts before those in front have ended and waits for them, so
    `seconds` count such times twice; `added_seconds` are those behind the end of all before."""
    ops: dict[str, dict[str, float]] = {}
    ended = -math.inf
    for kernel in sorted(kernels, key=lambda kernel: kernel.end):
        empty = {"seconds": 0.0, "added_seconds": 0.0, "launches": 0}
        op = ops.setdefault(op_of(kernel.name), empty)
        op["seconds"] += (kernel.end - kernel.begin) / 1e6
        op["added_seconds"] += (kernel.end - max(kernel.begin, ended)) / 1e6
        op["launches"] += 1
        ended = kernel.end
    return dict(sorted(ops.items(), key=lambda item: -item[1]["added_seconds"]))
