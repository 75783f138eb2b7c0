"""The selection kernels without TensorRT: compiled from plugins/kernels, called through ctypes."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from m3trt.bench.kernel_library import (
    KERNELS,
    PACKED_FIELDS,
    ROOT,
    Batch,
    check,
    compile_library,
    pointer,
    size_of,
    stream,
)

LIBRARY = ROOT / "out" / "select_kernels.so"
SOURCES = (
    ROOT / "bench" / "select_kernels.cu",
    KERNELS / "smxx_block_select.cu",
    KERNELS / "smxx_decode_select.cu",
    KERNELS / "smxx_prefill_select.cu",
    KERNELS / "smxx_select_top.cu",
    KERNELS / "sm90_prefill_select.cu",
)


class CSelectStep(ctypes.Structure):
    """`SelectStep` of select_kernels.cu."""

    _fields_ = [
        *PACKED_FIELDS,
        *((name, ctypes.c_int32) for name in ("num_decode", "q_len", "num_index_heads", "top_k")),
        *((name, ctypes.c_int32) for name in ("init_blocks", "local_blocks", "num_pages")),
    ]


@dataclasses.dataclass(frozen=True)
class Rule:
    """How many blocks a row gets, and which of them whatever they score."""

    top_k: int = 16
    init: int = 0
    local: int = 1


def load(library: Path = LIBRARY) -> ctypes.CDLL:
    """The library, compiled for this GPU when a source is newer.

    Raises:
        FileNotFoundError: it must be compiled and there is no nvcc.
        subprocess.CalledProcessError: nvcc failed.
    """
    return compile_library(library, SOURCES)


def c_step(
    batch: Batch, index_q: torch.Tensor, index_cache: torch.Tensor, rule: Rule
) -> CSelectStep:
    return CSelectStep(
        *batch.packed(),
        batch.num_decode,
        batch.q_len,
        index_q.shape[1],
        rule.top_k,
        rule.init,
        rule.local,
        len(index_cache),
    )


def select(
    library: ctypes.CDLL,
    kernel: str,
    batch: Batch,
    index_q: torch.Tensor,
    index_cache: torch.Tensor,
    scale: torch.Tensor | None = None,
    rule: Rule = Rule(),
    workspace: torch.Tensor | None = None,
) -> Callable[[], torch.Tensor]:
    """A call of `kernel`: block ids [Hi, N, top_k].

    decode_select, smxx_prefill_select and sm90_prefill_select write their rows, block_select all.

    index_q [N, Hi, D] bf16; index_cache [P, 128, D] bf16, or e4m3 with its scale [1].
    """
    step = c_step(batch, index_q, index_cache, rule)
    launch = getattr(library, f"m3_bench_{kernel}")
    if workspace is None:
        needed = size_of(getattr(library, f"m3_bench_{kernel}_workspace"), ctypes.byref(step))
        workspace = torch.empty(needed, dtype=torch.uint8, device="cuda")
    shape = (index_q.shape[1], batch.num_tokens, rule.top_k)
    ids = torch.full(shape, 0x7B7B7B7B, dtype=torch.int32, device="cuda")

    def call() -> torch.Tensor:
        assert batch.num_tokens == len(index_q)  # and the batch lives as long as the call
        tensors = (index_q, index_cache, scale, ids, workspace)
        check(launch(ctypes.byref(step), *map(pointer, tensors), stream()))
        return ids

    return call
