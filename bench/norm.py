"""Times the kernels around the layers on one GPU: residual addition with norm, the norm of chosen
rows before the logits, and embedding.

python -m m3trt.bench.norm

bf16, hidden size 6144, buffers rotated past the L2 cache, graph replay, median. Appends to
results/norm.jsonl. Bytes: each row read and written once; the weight of the norm stays in a cache.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import partial
from random import randrange
from typing import Any

import torch
from m3trt.bench import kernel_library as kernels
from m3trt.bench.kernel_library import COPY_TBS
from m3trt.bench.needs import require_gpus

HIDDEN, VOCAB, PROMPT = 6144, 200064, 32768
LIBRARY = kernels.ROOT / "out" / "norm_kernels.so"
SOURCES = (
    kernels.ROOT / "bench" / "norm_kernels.cu",
    kernels.KERNELS / "smxx_add_rms_norm.cu",
    kernels.KERNELS / "smxx_embedding.cu",
)
TOKENS = (1, 8, 32, 128, 1024, 8192)
Launch = Callable[[], None]


def random_rows(count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, device="cuda", dtype=torch.bfloat16)


def norm_call(
    library: ctypes.CDLL, chosen: bool, tokens: int, check: bool
) -> tuple[Launch, Launch]:
    """Addition and norm of `tokens` rows, ours and torch's two kernels.

    Args:
        chosen: as before the logits: rows by index, the sum not written. All in another order here;
            torch's run on rows that are already in this order.
    """
    x, residual, normed, total = (random_rows(tokens) for _ in range(4))
    weight = torch.rand(HIDDEN, device="cuda") + 0.5
    rows = torch.randperm(tokens, device="cuda").int() if chosen else None
    memory = (x, residual, weight, rows, normed, None if chosen else total)

    def ours() -> None:
        pointers = map(kernels.pointer, memory)
        status = library.m3_bench_add_rms_norm(
            ctypes.c_int64(tokens), HIDDEN, *pointers, kernels.stream()
        )
        kernels.check(status)

    half = weight.bfloat16()

    def torchs() -> None:
        torch.add(x, residual, out=total)
        torch.nn.functional.rms_norm(total, (HIDDEN,), half, 1e-6)

    if check:
        ours()
        added = x + residual
        if rows is not None:
            added = added[rows.long()]
        else:
            assert torch.equal(total, added)
        wide = added.double()
        exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
        error = ((normed.double() - exact).norm() / exact.norm()).item()
        assert error < 0.003, f"relative error {error}"
    return ours, torchs


def embedding_call(
    library: ctypes.CDLL, table: torch.Tensor, prompt: bool, tokens: int, check: bool
) -> tuple[Launch, Launch]:
    """Random rows of the vocabulary, ours and torch's `index_select`.

    Args:
        table: the vocabulary, then the prompt table.
        prompt: the middle half of the tokens is one image in the prompt table.
    """
    ids = torch.randint(0, VOCAB, (tokens,), device="cuda", dtype=torch.int32)
    if prompt:
        count = max(1, tokens // 2)
        start = VOCAB + randrange(PROMPT - count)
        ids[tokens // 4 :][:count] = torch.arange(start, start + count, device="cuda")
    out = random_rows(tokens)

    def ours() -> None:
        pointers = map(kernels.pointer, (ids, table, table[VOCAB:], out))
        status = library.m3_bench_embedding(
            ctypes.c_int64(tokens), VOCAB, HIDDEN, *pointers, kernels.stream()
        )
        kernels.check(status)

    def torchs() -> None:
        torch.index_select(table, 0, ids, out=out)

    if check:
        ours()
        assert torch.equal(out, table[ids.long()])
    return ours, torchs


def measure(op: str, tokens: int, passes: int, make: Callable[..., tuple[Launch, Launch]]) -> None:
    """Record one case that moves each row of its tokens `passes` times; `make(tokens, check)`."""
    moved = passes * tokens * HIDDEN * 2
    copies = max(3, min(64, int(300e6 // moved) + 1))
    calls = [make(tokens, index == 0) for index in range(copies)]
    seconds, beside = (
        kernels.graph_seconds([pair[which] for pair in calls], rounds=4) for which in (0, 1)
    )
    case: dict[str, Any] = {"op": op, "new": tokens, "dtype": "bfloat16"}
    record: dict[str, Any] = kernels.gpu_record(case, seconds, moved / (COPY_TBS * 1e12), "bytes")
    baselines = {"torch": beside}
    kernels.report(
        "norm", {**record, "rate": round(moved / seconds / 1e12, 3), "baselines": baselines}
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run and record every case."""
    parser = argparse.ArgumentParser(
        prog="python -m m3trt.bench.norm", description="Time the kernels around the layers."
    )
    parser.parse_args(argv)
    require_gpus(parser)
    library = kernels.compile_library(LIBRARY, SOURCES)
    table = random_rows(VOCAB + PROMPT)
    for tokens in TOKENS:
        measure("add_rms_norm", tokens, 4, partial(norm_call, library, False))
        measure("norm of chosen rows", tokens, 3, partial(norm_call, library, True))
        measure("embedding", tokens, 2, partial(embedding_call, library, table, False))
        measure("embedding with image", tokens, 2, partial(embedding_call, library, table, True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
