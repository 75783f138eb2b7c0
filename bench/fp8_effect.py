"""What e4m3 caches change in MSA decode, beside bf16 ones: selections and outputs.

    python -m m3trt.bench.fp8_effect

Both ways run through our kernels. `random`: independent normal values. `structured`: runs of tokens
about one topic, queries about some of them, two channels that are large in every key, as trained
models have them. Scales are per tensor: the largest value is e4m3's largest. Appends to
results/fp8_effect.jsonl:

* selection_overlap: the part of the 15 freely chosen blocks that both index caches choose
* attention_error: of the output with an e4m3 KV cache over the same blocks
* total_error: of the output when the e4m3 caches also choose the blocks

Errors are norms of differences over the norm of the bf16 output.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from m3trt.bench import kernel_library as kernels
from m3trt.bench.kernel_library import BLOCK, HEAD
from m3trt.bench.msa_library import Ours
from m3trt.bench.msa_steps import TOP_K, TP1, Pool, Step
from m3trt.bench.needs import require_gpus
from m3trt.bench.records import append_record
from torch import Tensor

BATCH, CONTEXTS = 16, (8192, 131072)
RUN_BLOCKS, TOPICS = 4, 6
LARGE_CHANNELS, LARGE = (5, 77), 6.0
E4M3_MAX = 448.0


def structure(s: Step, seed: int = 0) -> None:
    """Fill the caches and queries of a step in place; every KV and index head has its topics."""
    generator = torch.Generator(s.q.device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=s.q.device, generator=generator)

    groups = s.kv_heads
    for request, length in enumerate(s.lengths):
        blocks = -(-length // BLOCK)
        pages = s.batch.table[request, :blocks].long()
        runs = -(-blocks // RUN_BLOCKS)
        topics = normal(runs, 3 * groups + 1, HEAD)
        of_block = topics.repeat_interleave(RUN_BLOCKS, 0)[:blocks, None]
        about = torch.randint(runs, (groups, TOPICS), device=s.q.device, generator=generator)
        for group in range(groups):
            keys = (of_block[:, :, group] + normal(blocks, BLOCK, HEAD)) * 0.7
            keys[..., LARGE_CHANNELS] += LARGE
            s.kv_cache[pages, 0, :, group] = keys.to(s.kv_cache.dtype)
            values = of_block[:, :, groups + group] + normal(blocks, BLOCK, HEAD)
            s.kv_cache[pages, 1, :, group] = values.to(s.kv_cache.dtype)
            heads = s.q.shape[1] // groups
            wanted = topics[about[group], group].mean(0) * TOPICS**0.5
            noise = normal(heads, HEAD)
            s.q[request, group * heads : (group + 1) * heads] = (wanted + noise).to(s.q.dtype)
            wanted = topics[about[group], 3 * groups].mean(0) * TOPICS**0.5
            s.index_q[request, group] = (wanted + normal(HEAD)).to(s.q.dtype)
        keys = (of_block[:, :, 3 * groups] + normal(blocks, BLOCK, HEAD)) * 0.7
        keys[..., LARGE_CHANNELS] += LARGE
        s.index_cache[pages] = keys.to(s.index_cache.dtype)


def quantized(cache: Tensor) -> tuple[Tensor, Tensor]:
    """An e4m3 cache and its scale [1]: real = stored * scale."""
    scale = (cache.abs().max().float() / E4M3_MAX).reshape(1)
    return (cache / scale.to(cache.dtype)).to(torch.float8_e4m3fn), scale


def overlap(a: Tensor, b: Tensor) -> float:
    """The part of the freely chosen blocks [G, N, 15] that are in both selections."""
    both = (a[:, :, :-1, None] == b[:, :, None, :-1]).any(3)
    return float(both.float().mean())


def error(out: Tensor, want: Tensor) -> float:
    return float((out.float() - want.float()).norm() / want.float().norm())


def measure(ours: Any, s: Step) -> dict[str, float]:
    """The three figures of a step, whose caches are bf16."""
    kv, kv_scale = quantized(s.kv_cache)
    index, index_scale = quantized(s.index_cache)
    small = replace(s, index_cache=index, kv_cache=kv)
    scales = {"index_scale": index_scale, "kv_scale": kv_scale}
    ids, ids8 = ours.select(s)(), ours.select(small, **scales)()
    want = ours.attend(s)(ids)
    attend = ours.attend(small, **scales)
    return {
        "selection_overlap": round(overlap(ids, ids8), 4),
        "attention_error": round(error(attend(ids), want), 5),
        "total_error": round(error(attend(ids8), want), 5),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print and record every case."""
    parser = argparse.ArgumentParser(
        prog="python -m m3trt.bench.fp8_effect", description="Measure what e4m3 caches change."
    )
    parser.parse_args(argv)
    require_gpus(parser)
    ours, device = Ours(), {"device": torch.cuda.get_device_name()}
    pool = Pool.random(BATCH * max(CONTEXTS) // BLOCK + 3)
    for data in ("random", "structured"):
        for context in CONTEXTS:
            s = pool.step(TP1, [context] * BATCH)
            if data == "structured":
                structure(s)
            case = {"data": data, "context": context, "batch": BATCH, "top_k": TOP_K}
            found = measure(ours, s)
            append_record("fp8_effect", {"case": case} | found | device, kernels.versions())
            print(case, found, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
