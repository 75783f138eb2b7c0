"""Times the dense attention kernels on one GPU: decode and prefill.

python -m m3trt.bench.paged_attention

bf16, random data on shuffled pages, buffers rotated past the L2 cache, graph replay, median. Every
result is first compared with fp32 attention. Appends to results/paged_attention.jsonl.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from m3trt.bench import kernel_library as kernels
from m3trt.bench.floors import dense_attention
from m3trt.bench.kernel_library import BLOCK, HEAD, Batch
from m3trt.bench.needs import require_gpus

ROTATED_BYTES = 300e6
DENSE_DECODE = (
    # batch, context, query heads, KV heads, query tokens
    (1, 8192, 64, 4, 1),
    (1, 131072, 64, 4, 1),
    (8, 131072, 64, 4, 1),
    (32, 131072, 64, 4, 1),
    (8, 131072, 16, 1, 1),
    (8, 131072, 8, 1, 1),
    (8, 131072, 64, 4, 4),
)
PREFILL = ((8192, 0), (16384, 0), (16384, 31744))


def pool(pages: int, kv_heads: int) -> torch.Tensor:
    return torch.randn(pages, 2, BLOCK, kv_heads, HEAD, device="cuda", dtype=torch.bfloat16)


def queries(batch: Batch, heads: int) -> torch.Tensor:
    return torch.randn(batch.num_tokens, heads, HEAD, device="cuda", dtype=torch.bfloat16)


def check(out: torch.Tensor, batch: Batch, q: torch.Tensor, kv: torch.Tensor, token: int) -> None:
    """One token of the last request against fp32 attention.

    Raises:
        AssertionError: they differ by more than bf16 explains.
    """
    request = len(batch.sequence_length) - 1
    length = int(batch.sequence_length[request]) - (batch.num_tokens - 1 - token)
    pages = batch.table[request, : -(-length // BLOCK)].long()
    groups = q.shape[1] // kv.shape[3]
    for head in range(kv.shape[3]):
        own = kv[pages, :, :, head].float()
        keys, values = (own[:, half].reshape(-1, HEAD)[:length] for half in range(2))
        rows = slice(head * groups, (head + 1) * groups)
        weights = torch.softmax(q[token, rows].float() @ keys.T * HEAD**-0.5, dim=-1)
        want = weights @ values
        got = out[token].view(-1, HEAD)[rows].float()
        error = ((got - want).norm() / want.norm()).item()
        assert error < 0.01, f"token {token}, KV head {head}: relative error {error}"


def decode_case(
    library: ctypes.CDLL, size: int, context: int, heads: int, kv_heads: int, q_len: int
) -> None:
    case = {"batch": size, "context": context, "q_heads": heads, "kv_heads": kv_heads}
    case |= {"q_len": q_len, "dtype": "bfloat16", "phase": "decode"}  # type: ignore[dict-item]
    floor = dense_attention(case)
    read = floor.amount
    copies = max(1, min(64, int(ROTATED_BYTES // read) + 1))
    calls: list[Callable[[], Any]] = []
    for i in range(copies):
        batch = Batch.make([context] * size, q_len=q_len, seed=i)
        kv, q = pool(batch.num_pages, kv_heads), queries(batch, heads)
        call = kernels.decode(library, batch, q, kv)
        if i == 0:
            check(call(), batch, q, kv, batch.num_tokens - 1)
        calls.append(call)
    seconds = kernels.graph_seconds(calls, rounds=4 if read > 5e9 else max(1, 8 // copies))
    kernels.report("paged_attention", kernels.gpu_record(case, seconds, floor.seconds, "bytes"))


def sdpa_seconds(new: int, heads: int) -> dict[str, float]:
    """torch's attention on contiguous tensors of one chunk without prefix, KV heads repeated."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = (1, heads, new, HEAD)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    attention = torch.nn.functional.scaled_dot_product_attention
    times = {}
    for name, backend in (
        ("torch cuDNN SDPA", SDPBackend.CUDNN_ATTENTION),
        ("torch FlashAttention-2 SDPA", SDPBackend.FLASH_ATTENTION),
    ):
        with sdpa_kernel(backend):
            times[name] = kernels.graph_seconds(
                [lambda: attention(q, k, v, is_causal=True)], repeats=5, rounds=2
            )
    return times


def prefill_case(
    library: ctypes.CDLL, new: int, prefix: int, heads: int = 64, kv_heads: int = 4
) -> None:
    batch = Batch.make([prefix + new], new=[new])
    kv, q = pool(batch.num_pages, kv_heads), queries(batch, heads)
    baselines = sdpa_seconds(new, heads) if prefix == 0 else {}
    for wgmma in (True, False) if kernels.has_wgmma() else (False,):
        call = kernels.prefill(library, batch, q, kv, wgmma)
        for token in (0, new // 2, new - 1):
            check(call(), batch, q, kv, token)
        seconds = kernels.graph_seconds([call], repeats=5, rounds=2)
        case = {"new": new, "prefix": prefix, "q_heads": heads, "kv_heads": kv_heads}
        kernel = "sm90" if wgmma else "smxx"
        case |= {"dtype": "bfloat16", "phase": "prefill", "kernel": kernel}  # type: ignore[dict-item]
        record = kernels.gpu_record(case, seconds, dense_attention(case).seconds, "flops")
        kernels.report("paged_attention", record | {"baselines": baselines, "runs": 5})


def main(argv: Sequence[str] | None = None) -> int:
    """Run and record every case."""
    parser = argparse.ArgumentParser(
        prog="python -m m3trt.bench.paged_attention", description="Time the attention kernels."
    )
    parser.parse_args(argv)
    require_gpus(parser)
    library = kernels.load()
    for prefill in PREFILL:
        prefill_case(library, *prefill)
        torch.cuda.empty_cache()
    for decode in DENSE_DECODE:
        decode_case(library, *decode)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
