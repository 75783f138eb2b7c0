"""Times the cache update on one GPU: norms, rotation and writes into the pages.

python -m m3trt.bench.cache_update

bf16, one chunk on shuffled pages, buffers rotated past the L2 cache, graph replay, median. Appends
to results/cache_update.jsonl. Bytes: qkv read, q, index q and the cache slots written, once each.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Sequence
from typing import Any

import torch
from m3trt.bench import kernel_library as kernels
from m3trt.bench.kernel_library import BLOCK, COPY_TBS, HEAD, Batch
from m3trt.bench.needs import require_gpus

ROTARY, THETA = 64, 5e6
CASES = (
    # tokens, query heads, KV heads, index heads (0: a dense layer)
    (8192, 64, 4, 4),
    (8192, 64, 4, 0),
    (8192, 16, 1, 1),
    (8192, 8, 1, 1),
    (8192, 8, 1, 0),
    (1024, 64, 4, 4),
    (32, 64, 4, 4),
    (1, 64, 4, 4),
)


class Call:
    """One launch on tensors of its own."""

    def __init__(
        self, library: ctypes.CDLL, tokens: int, heads: int, kv_heads: int, index_heads: int
    ) -> None:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, device="cuda", dtype=torch.bfloat16)

        rows = heads + 2 * kv_heads + (index_heads + 1 if index_heads else 0)
        self.library, self.index_heads = library, index_heads
        self.batch = Batch.make([tokens], new=[tokens])
        self.step = self.batch.as_c(heads, kv_heads)
        pages = self.batch.num_pages
        frequency = 1.0 / THETA ** (torch.arange(0, ROTARY, 2, dtype=torch.float32) / ROTARY)
        self.tensors = (
            torch.randn(tokens, rows, HEAD, device="cuda", dtype=torch.bfloat16),
            torch.arange(tokens, device="cuda", dtype=torch.int32),
            empty(pages, 2, BLOCK, kv_heads, HEAD),
            empty(pages, BLOCK, HEAD),
            frequency.cuda(),
            torch.rand(4, HEAD, device="cuda") + 0.5,
            empty(tokens, heads, HEAD),
            empty(tokens, max(1, index_heads), HEAD),
        )

    def __call__(self) -> None:
        kernels.check(
            self.library.m3_bench_cache_update(
                ctypes.byref(self.step),
                self.index_heads,
                ROTARY,
                *map(kernels.pointer, self.tensors),
                kernels.stream(),
            )
        )

    def verify(self) -> None:
        """The last token's queries and key against the formula.

        Raises:
            AssertionError: they differ by more than bf16 explains.
        """
        qkv, _, kv, _, frequency, norms, q, _ = self.tensors
        token, heads = len(qkv) - 1, q.shape[1]
        for head, norm, got in (
            (heads - 1, norms[0], q[token, -1]),
            (heads, norms[1], kv[self.batch.table[0, token // BLOCK], 0, token % BLOCK, 0]),
        ):
            x = qkv[token, head].float()
            x = x * torch.rsqrt(x.square().mean() + 1e-6) * norm
            angle = token * frequency
            a, b = x[: ROTARY // 2], x[ROTARY // 2 : ROTARY]
            want = torch.cat(
                [
                    a * angle.cos() - b * angle.sin(),
                    b * angle.cos() + a * angle.sin(),
                    x[ROTARY:],
                ]
            )
            error = ((got.float() - want).norm() / want.norm()).item()
            assert error < 0.005, f"head {head}: relative error {error}"


def measure(
    library: ctypes.CDLL, tokens: int, heads: int, kv_heads: int, index_heads: int
) -> dict[str, Any]:
    """Time one case; returns its record."""
    rows = heads + 2 * kv_heads + (index_heads + 1 if index_heads else 0)
    moved = 2 * tokens * rows * HEAD * 2
    copies = max(3, min(64, int(300e6 // moved) + 1))
    calls = [Call(library, tokens, heads, kv_heads, index_heads) for _ in range(copies)]
    calls[0]()
    calls[0].verify()
    seconds = kernels.graph_seconds(list(calls), rounds=4)
    case = {"new": tokens, "q_heads": heads, "kv_heads": kv_heads, "index_heads": index_heads}
    case |= {"dtype": "bfloat16"}  # type: ignore[dict-item]
    record: dict[str, Any] = kernels.gpu_record(case, seconds, moved / (COPY_TBS * 1e12), "bytes")
    return {**record, "rate": round(moved / seconds / 1e12, 3)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run and record every case."""
    parser = argparse.ArgumentParser(
        prog="python -m m3trt.bench.cache_update", description="Time the cache update."
    )
    parser.parse_args(argv)
    require_gpus(parser)
    library = kernels.load()
    for case in CASES:
        kernels.report("cache_update", measure(library, *case))
    return 0


if __name__ == "__main__":
    sys.exit(main())
