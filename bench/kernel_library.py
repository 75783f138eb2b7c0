"""The paged kernels without TensorRT: compiled from plugins/kernels, called through ctypes.

For benches and direct kernel tests on a machine with a GPU, torch and nvcc.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from m3trt.bench.records import append_record

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "plugins" / "kernels"
LIBRARY = ROOT / "out" / "attention_kernels.so"
SOURCES = (
    ROOT / "bench" / "attention_kernels.cu",
    KERNELS / "smxx_cache_update.cu",
    KERNELS / "smxx_paged_decode.cu",
    KERNELS / "smxx_selected_decode.cu",
    KERNELS / "smxx_page_decode.cu",
    KERNELS / "smxx_paged_prefill.cu",
    KERNELS / "sm90_paged_prefill.cu",
    KERNELS / "smxx_join_tiles.cu",
    KERNELS / "smxx_invert_blocks.cu",
    KERNELS / "smxx_invert_chunk.cu",
    KERNELS / "smxx_merge_partials.cu",
    KERNELS / "smxx_sparse_prefill_plan.cu",
    KERNELS / "smxx_sparse_prefill.cu",
    KERNELS / "sm90_sparse_prefill.cu",
)
BLOCK, HEAD = 128, 128
READ_TBS, COPY_TBS, BF16_TFLOPS = 4.69, 4.2, 703.0
"""Ceilings measured on an H200: reading, copying (bytes both ways), sustained bf16 products."""


PACKED_FIELDS: list[tuple[str, Any]] = [
    *((name, ctypes.c_void_p) for name in ("cu_query_lens", "sequence_length", "table")),
    *((name, ctypes.c_int32) for name in ("num_requests", "num_tokens", "max_pages")),
]
"""With which every C step begins; Batch.packed has their values."""


class CStep(ctypes.Structure):
    """`Step` of attention_kernels.cu."""

    _fields_ = [
        *PACKED_FIELDS,
        *((name, ctypes.c_int32) for name in ("num_decode", "q_len", "num_heads", "num_kv_heads")),
        ("softmax_scale", ctypes.c_float),
    ]


def load(library: Path = LIBRARY) -> ctypes.CDLL:
    """The attention kernels; see compile_library."""
    return compile_library(library, SOURCES)


def compile_library(library: Path, sources: Sequence[Path], *more: str) -> ctypes.CDLL:
    """A library, all its sources compiled at once for this GPU when one is newer.

    Raises:
        FileNotFoundError: it must be compiled and there is no nvcc.
        subprocess.CalledProcessError: nvcc failed.
    """
    newest = max(path.stat().st_mtime for path in [*sources, *KERNELS.glob("*.*h")])
    if library.exists() and library.stat().st_mtime >= newest:
        return ctypes.CDLL(str(library))
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    major, minor = torch.cuda.get_device_capability()
    name = f"{major}{minor}" + ("a" if major >= 9 else "")
    flags = ["-std=c++17", "-Xcompiler=-fPIC", f"-I{ROOT / 'plugins'}", *more]
    flags += [f"-gencode=arch=compute_{name},code=sm_{name}"]
    library.parent.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
        calls = [
            [nvcc, *flags, "-c", str(source), "-o", output]
            for source, output in zip(sources, objects, strict=True)
        ]
        list(pool.map(lambda call: subprocess.run(call, check=True), calls))
        subprocess.run([nvcc, *flags, "-shared", "-o", str(library), *objects], check=True)
    return ctypes.CDLL(str(library))


def has_wgmma() -> bool:
    """Whether this GPU runs the sm90_* kernels: those of other capabilities do not."""
    return torch.cuda.get_device_capability() == (9, 0)


def check(status: int) -> None:
    assert status == 0, f"the launch failed with CUDA error {status}"


def size_of(function: Any, *arguments: Any) -> int:
    """What a C function of type int64_t returns."""
    function.restype = ctypes.c_int64
    return int(function(*arguments))


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


def stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


@dataclass
class Batch:
    """Packed requests on shuffled pages of a pool: `decode` of them last, q_len tokens each."""

    cu_query_lens: torch.Tensor
    sequence_length: torch.Tensor
    table: torch.Tensor
    num_tokens: int
    num_decode: int
    q_len: int
    num_pages: int

    @classmethod
    def make(
        cls,
        lengths: list[int],
        new: list[int] | None = None,
        q_len: int = 1,
        max_pages: int = 0,
        padded_rows: int = 0,
        seed: int = 0,
        device: str = "cuda",
    ) -> Batch:
        """Decode rows of these lengths; context chunks of `new` tokens when that is given."""
        counts = [q_len] * len(lengths) if new is None else new
        pages = [-(-length // BLOCK) for length in lengths]
        generator = torch.Generator().manual_seed(seed)
        total = sum(pages) + 3
        order = torch.randperm(total, generator=generator).to(torch.int32)
        columns = max([1, max_pages, *pages])
        table = torch.full((len(lengths) + padded_rows, columns), -1, dtype=torch.int32)
        start = 0
        for row, count in enumerate(pages):
            table[row, :count] = order[start : start + count]
            start += count
        offsets = torch.zeros(len(lengths) + padded_rows + 1, dtype=torch.int32)
        offsets[1 : len(lengths) + 1] = torch.tensor(counts).cumsum(0)
        offsets[len(lengths) + 1 :] = sum(counts)
        padded = torch.tensor([*lengths, *[0] * padded_rows], dtype=torch.int32)
        return cls(
            offsets.to(device),
            padded.to(device),
            table.to(device),
            sum(counts) + padded_rows * q_len,
            len(lengths) + padded_rows if new is None else 0,
            q_len if new is None else 1,
            total,
        )

    def packed(self) -> tuple[int, ...]:
        """The values of PACKED_FIELDS; the batch must live as long as they."""
        tensors = (self.cu_query_lens, self.sequence_length, self.table)
        pointers = (tensor.data_ptr() for tensor in tensors)
        return (*pointers, len(self.sequence_length), self.num_tokens, self.table.shape[1])

    def as_c(self, heads: int, kv_heads: int, scale: float = HEAD**-0.5) -> CStep:
        return CStep(*self.packed(), self.num_decode, self.q_len, heads, kv_heads, scale)


def decode(
    library: ctypes.CDLL,
    batch: Batch,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_ids: torch.Tensor | None = None,
    kv_scale: torch.Tensor | None = None,
    poison: int = 0xFF,
) -> Callable[[], torch.Tensor]:
    """A call of the decode kernel on these tensors: [N, Hq * D].

    Args:
        kv_scale: of an e4m3 cache.
        poison: the byte that the workspace is full of.
    """
    step = batch.as_c(q.shape[1], kv_cache.shape[3])
    selected = int(block_ids is not None)
    bytes_needed = size_of(library.m3_bench_decode_workspace, ctypes.byref(step), selected)
    workspace = torch.full((bytes_needed,), poison, dtype=torch.uint8, device="cuda")
    out = torch.full((q.shape[0], q.shape[1] * HEAD), torch.nan, dtype=q.dtype, device="cuda")
    top_k = 0 if block_ids is None else block_ids.shape[2]

    def call() -> torch.Tensor:
        assert batch.num_tokens == len(q)  # and the batch lives as long as the call
        tensors = (q, kv_cache, block_ids)
        check(
            library.m3_bench_decode(
                ctypes.byref(step),
                *map(pointer, tensors),
                top_k,
                pointer(out),
                pointer(workspace),
                stream(),
                pointer(kv_scale),
            )
        )
        return out

    return call


def prefill(
    library: ctypes.CDLL, batch: Batch, q: torch.Tensor, kv_cache: torch.Tensor, wgmma: bool
) -> Callable[[], torch.Tensor]:
    """A call of a prefill kernel on the context rows: [N, Hq * D]."""
    step = batch.as_c(q.shape[1], kv_cache.shape[3])
    out = torch.full((q.shape[0], q.shape[1] * HEAD), torch.nan, dtype=q.dtype, device="cuda")

    def call() -> torch.Tensor:
        assert batch.num_tokens == len(q)  # and the batch lives as long as the call
        check(
            library.m3_bench_prefill(
                ctypes.byref(step),
                pointer(q),
                pointer(kv_cache),
                len(kv_cache),
                pointer(out),
                int(wgmma),
                stream(),
            )
        )
        return out

    return call


def sparse_prefill(
    library: ctypes.CDLL,
    batch: Batch,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_ids: torch.Tensor,
    wgmma: bool,
    rounds: tuple[int, int] = (0, 0),
    kv_scale: torch.Tensor | None = None,
) -> Callable[[], torch.Tensor]:
    """A call of the block-major kernels on the context rows: [N, Hq * D].

    Args:
        rounds: tokens and KV heads computed at once; 0 for the kernels' own choice.
    """
    step = batch.as_c(q.shape[1], kv_cache.shape[3])
    top_k = block_ids.shape[2]
    count = size_of(library.m3_bench_sparse_prefill_workspace, ctypes.byref(step), top_k)
    workspace = torch.full((count,), 255, dtype=torch.uint8, device="cuda")
    out = torch.full((q.shape[0], q.shape[1] * HEAD), torch.nan, dtype=q.dtype, device="cuda")

    def call() -> torch.Tensor:
        assert batch.num_tokens == len(q)  # and the batch lives as long as the call
        check(
            library.m3_bench_sparse_prefill(
                ctypes.byref(step),
                *map(pointer, (q, kv_cache, kv_scale, block_ids)),
                len(kv_cache),
                top_k,
                *rounds,
                int(wgmma),
                pointer(out),
                pointer(workspace),
                stream(),
            )
        )
        return out

    return call


def selected_rows(
    library: ctypes.CDLL,
    batch: Batch,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_ids: torch.Tensor,
    kv_scale: torch.Tensor | None = None,
) -> Callable[[], torch.Tensor]:
    """A call of the query-major kernel on the context rows: [N, Hq * D]."""
    step = batch.as_c(q.shape[1], kv_cache.shape[3])
    top_k = block_ids.shape[2]
    out = torch.full((q.shape[0], q.shape[1] * HEAD), torch.nan, dtype=q.dtype, device="cuda")

    def call() -> torch.Tensor:
        assert batch.num_tokens == len(q)  # and the batch lives as long as the call
        tensors = map(pointer, (q, kv_cache, kv_scale, block_ids))
        launch = library.m3_bench_selected_rows
        check(launch(ctypes.byref(step), *tensors, top_k, pointer(out), stream()))
        return out

    return call


def dense_rows(
    library: ctypes.CDLL,
    batch: Batch,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_ids: torch.Tensor,
    wgmma: bool,
) -> Callable[[], torch.Tensor]:
    """A call of a dense kernel that masks what the context rows did not choose: [N, Hq * D]."""
    step = batch.as_c(q.shape[1], kv_cache.shape[3])
    out = torch.full((q.shape[0], q.shape[1] * HEAD), torch.nan, dtype=q.dtype, device="cuda")

    def call() -> torch.Tensor:
        assert batch.num_tokens == len(q)  # and the batch lives as long as the call
        tensors = map(pointer, (q, kv_cache, block_ids))
        shape = (len(kv_cache), block_ids.shape[2])
        launch = library.m3_bench_masked_prefill
        check(launch(ctypes.byref(step), *tensors, *shape, pointer(out), int(wgmma), stream()))
        return out

    return call


ROUTES = ("rows", "dense", "blocks")


def route(library: ctypes.CDLL, batch: Batch, heads: int, kv_heads: int, top_k: int) -> str:
    """How the plugin computes context rows, where it has the kernels."""
    step = batch.as_c(heads, kv_heads)
    return ROUTES[library.m3_bench_sparse_route(ctypes.byref(step), top_k)]


def context_rows(
    library: ctypes.CDLL,
    batch: Batch,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_ids: torch.Tensor,
    wgmma: bool,
    kv_scale: torch.Tensor | None = None,
) -> Callable[[], torch.Tensor]:
    """A call of what the plugin chooses for the context rows: [N, Hq * D]."""
    inputs = (q, kv_cache, block_ids)
    chosen = route(library, batch, q.shape[1], kv_cache.shape[3], block_ids.shape[2])
    if chosen == "rows":
        return selected_rows(library, batch, *inputs, kv_scale)
    if chosen == "dense" and kv_scale is None:
        return dense_rows(library, batch, *inputs, wgmma)
    return sparse_prefill(library, batch, *inputs, wgmma, kv_scale=kv_scale)


def graph_seconds(calls: list[Callable[[], Any]], repeats: int = 9, rounds: int = 1) -> float:
    """Median seconds of one call, from replays of one CUDA graph of `rounds` times all `calls`.

    Several calls on buffers of their own keep the data out of the L2 cache.
    """
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())  # the inputs
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(repeats):
        events: Any = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        start, end = events
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / (len(calls) * rounds))
    return float(median(times))


@cache
def driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return found[0] if found else None


def gpu_record(case: dict[str, Any], seconds: float, floor: float, bound: str) -> dict[str, Any]:
    """The part of a result record that all GPU benches share; rate follows from the floor."""
    unit, ceiling = ("TB/s", READ_TBS) if bound == "bytes" else ("TFLOP/s", BF16_TFLOPS)
    return {
        "case": case,
        "seconds": seconds,
        "floor_seconds": floor,
        "bound": bound,
        "rate": round(ceiling * floor / seconds, 3),
        "rate_unit": unit,
        "baselines": {},
        "runs": 9,
        "device": torch.cuda.get_device_name(),
        "driver": driver(),
    }


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "cuda": str(torch.version.cuda)}


def report(bench: str, record: dict[str, Any]) -> None:
    """Append the record and print its line of the table."""
    append_record(bench, record, versions())
    case = " ".join(f"{key}={value}" for key, value in record["case"].items())
    others = " ".join(f"{name} {value * 1e6:.1f} us" for name, value in record["baselines"].items())
    print(
        f"{bench}: {case}: {record['seconds'] * 1e6:.1f} us, floor "
        f"{record['floor_seconds'] * 1e6:.1f} us, {record['rate']} {record['rate_unit']} {others}",
        flush=True,
    )
