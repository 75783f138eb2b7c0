"""Our MSA kernels as a contestant of the benches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from m3trt.bench import kernel_library as kernels
from m3trt.bench import select_library
from m3trt.bench.kernel_library import KERNELS, ROOT, pointer, stream
from m3trt.bench.msa_steps import TOP_K, Step
from torch import Tensor

INVERT_LIBRARY = ROOT / "out" / "invert_kernels.so"
INVERT_SOURCES = (
    ROOT / "bench" / "invert_kernels.cu",
    KERNELS / "smxx_invert_blocks.cu",
    KERNELS / "smxx_invert_chunk.cu",
    KERNELS / "smxx_join_tiles.cu",
)


def unit_scale(cache: Tensor) -> Tensor | None:
    """Of an e4m3 cache whose values are of order 1."""
    if cache.dtype != torch.float8_e4m3fn:
        return None
    return torch.ones(1, device=cache.device)


class CInvertStep(ctypes.Structure):
    """`InvertStep` of invert_kernels.cu."""

    _fields_ = [
        *kernels.PACKED_FIELDS,
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "top_k")),
    ]


class Ours:
    """The fast paths of this GPU."""

    name = "ours"

    def __init__(self) -> None:
        self.attention, self.selection = kernels.load(), select_library.load()
        self.inversion = kernels.compile_library(INVERT_LIBRARY, INVERT_SOURCES)
        self.wgmma = kernels.has_wgmma()

    def retune(self) -> None:
        """Nothing is tuned at run time."""

    def select(self, s: Step, index_scale: Tensor | None = None, **_: Any) -> Callable[[], Tensor]:
        wgmma = self.wgmma and s.index_cache.dtype == torch.bfloat16
        kernel = f"{'sm90' if wgmma else 'smxx'}_prefill_select"
        kernel = "decode_select" if s.decoding else kernel
        scale = unit_scale(s.index_cache) if index_scale is None else index_scale
        return select_library.select(
            self.selection, kernel, s.batch, s.index_q, s.index_cache, scale
        )

    def attend(
        self, s: Step, kv_scale: Tensor | None = None, **_: Any
    ) -> Callable[[Tensor], Tensor]:
        made: dict[int, Callable[[], Tensor]] = {}
        scale = unit_scale(s.kv_cache) if kv_scale is None else kv_scale

        def call(ids: Tensor) -> Tensor:
            key = ids.data_ptr()
            if key not in made:
                arguments = (self.attention, s.batch, s.q, s.kv_cache, ids)
                if s.decoding:
                    made[key] = kernels.decode(*arguments, scale)
                else:
                    wgmma = self.wgmma and s.kv_cache.dtype == torch.bfloat16
                    made[key] = kernels.context_rows(*arguments, wgmma, scale)
            return made[key]()

        return call

    def invert(self, s: Step, ids: Tensor) -> Callable[[], None]:
        """The queries of each block, the first part of `attend`."""
        batch = s.batch
        step = CInvertStep(*batch.packed(), s.q.shape[1], s.kv_heads, TOP_K)
        needed = kernels.size_of(self.inversion.m3_bench_invert_workspace, ctypes.byref(step))
        workspace = torch.empty(needed, dtype=torch.uint8, device="cuda")

        def call() -> None:
            assert batch.num_tokens == len(s.q)  # and the batch lives as long as the call
            arguments = (pointer(ids), pointer(workspace), stream())
            kernels.check(self.inversion.m3_bench_invert(ctypes.byref(step), *arguments))

        return call

    def dense(self, s: Step) -> Callable[[], Tensor]:
        """Attention over all earlier tokens."""
        if s.decoding:
            scale = unit_scale(s.kv_cache)
            return kernels.decode(self.attention, s.batch, s.q, s.kv_cache, None, scale)
        return kernels.prefill(self.attention, s.batch, s.q, s.kv_cache, self.wgmma)
