"""Times MSA decode on one GPU: index scoring and selection, sparse attention, both in one chain.

    python -m m3trt.bench.decode [--peers FOLDER] [--quick]

Random data on shuffled pages, buffers rotated past the L2 cache, graph replay, median. Every result
is first compared with fp32. Appends to results/decode_index_select.jsonl, decode_attention.jsonl
and decode_total.jsonl. With FOLDER (see m3trt.bench.peers) the kernels of vLLM, SGLang and
FlashAttention run beside ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

import torch
from m3trt.bench import kernel_library as kernels
from m3trt.bench import msa_steps as steps
from m3trt.bench.gather import gather_blocks
from m3trt.bench.kernel_library import BLOCK, HEAD, Batch
from m3trt.bench.msa_bench import (
    FLOAT8,
    Contestants,
    Table,
    Work,
    command,
    make_call,
    make_record,
    still_usable,
    verify,
)
from m3trt.bench.msa_steps import TOP_K, TP1, TP4, TP8, Heads, Pool, Step
from m3trt.bench.records import append_record
from torch import Tensor

POOL_PAGES = 65_552  # eight requests of 1 M tokens
K, M = 1024, 1 << 20
RAGGED = "11k..236k"
PARTS = {"select": "decode_index_select", "attend": "decode_attention", "total": "decode_total"}
ALL = tuple(PARTS)
RUNS, SPARSE_LAYERS, LONG = 7, 57, 5e-3


@dataclass(frozen=True)
class Case:
    """One batch; `context` 0 draws the lengths between 11k and 236k."""

    heads: Heads
    batch: int
    context: int
    q_len: int = 1
    dtype: str = "bfloat16"
    parts: tuple[str, ...] = ("select", "total")
    dense: bool = False

    @property
    def aimed(self) -> bool:
        """Whether there is a target for it."""
        return any((*self.key, part) in TARGETS for part in self.parts)

    @property
    def key(self) -> tuple[Heads, int, int, int]:
        return self.heads, self.batch, self.context, self.q_len

    def lengths(self) -> list[int]:
        if self.context:
            return [self.context] * self.batch
        generator = torch.Generator().manual_seed(28)
        drawn = torch.randint(11 * K, 236 * K, (self.batch,), generator=generator)
        return [int(length) for length in drawn]

    def work(self, part: str) -> Work:
        """Every request's index keys once; every row's chosen blocks, at most the whole context."""
        element, keys = 1 if self.dtype == FLOAT8 else 2, sum(self.lengths())
        chosen = self.batch * self.q_len * TOP_K * BLOCK
        select = Work(element * keys * HEAD, 2.0 * HEAD * keys * self.heads.index * self.q_len)
        attend = Work(
            element * min(chosen, keys) * 2 * self.heads.kv * HEAD,
            4.0 * HEAD * chosen * self.heads.q,
        )
        return {"select": select, "attend": attend, "total": select + attend}[part]

    def describe(self, shared: bool) -> dict[str, Any]:
        """`case` of the record."""
        where = {"context": self.context} if self.context else {"lengths": RAGGED}
        heads = {"q_heads": self.heads.q, "kv_heads": self.heads.kv}
        return {
            **{"batch": self.batch, **where, "q_len": self.q_len, **heads},
            **{"index_heads": self.heads.index, "dtype": self.dtype, "shared_pages": shared},
        }


US = 1e-6
TARGETS = {
    **{(TP1, batch, 128 * K, 1, "select"): t * US for batch, t in ((1, 11), (8, 64), (32, 245))},
    **{(TP1, batch, M, 1, "select"): t * US for batch, t in ((1, 65), (8, 490))},
    (TP1, 32, 0, 1, "select"): 230 * US,
    **{
        (TP1, batch, 128 * K, 1, "attend"): t * US
        for batch, t in ((1, 5), (8, 11), (32, 33), (128, 125))
    },
    **{
        (TP1, 1, context, 1, "total"): t * US
        for context, t in ((8 * K, 9), (32 * K, 11), (128 * K, 15), (512 * K, 36), (M, 68))
    },
    **{(TP4, batch, 128 * K, 1, "select"): t * US for batch, t in ((1, 10.5), (8, 62), (32, 245))},
    **{
        (TP4, batch, 128 * K, 1, "attend"): t * US
        for batch, t in ((1, 4), (8, 6), (32, 11), (128, 34))
    },
    **{(TP1, batch, 128 * K, 4, "select"): t * US for batch, t in ((8, 68), (32, 255))},
    **{(TP1, batch, 128 * K, 4, "attend"): t * US for batch, t in ((8, 33), (32, 122))},
}
"""Seconds that our kernels should reach: heads, batch, context, q_len, part."""

QUICK = (
    *(Case(TP1, batch, 128 * K, parts=ALL, dense=True) for batch in (1, 8, 32)),
    Case(TP1, 1, 8 * K),
    *(Case(TP1, batch, M, dense=True) for batch in (1, 8)),
    Case(TP1, 32, 0),
    Case(TP1, 128, 128 * K, parts=("attend",)),
    *(Case(TP4, batch, 128 * K, parts=ALL) for batch in (1, 8, 32)),
    Case(TP1, 8, 128 * K, q_len=4, parts=ALL[:2]),
    Case(TP1, 8, M, dtype=FLOAT8, dense=True),
)


def full() -> list[Case]:
    """Every case that the project's targets name, first, and those around them."""
    cases = [
        Case(TP1, batch, context, parts=ALL if context == 128 * K else ALL[::2])
        for context in (8 * K, 32 * K, 128 * K, 512 * K, M)
        for batch in (1, 8, 32, 128)
    ]
    cases += [Case(TP1, batch, 0) for batch in (32, 128)]
    cases += [Case(TP1, batch, 128 * K, 4, parts=ALL) for batch in (8, 32)]
    for heads in (TP4, TP8):
        cases += [Case(heads, batch, 128 * K, parts=ALL) for batch in (1, 8, 32, 128)]
        cases += [Case(heads, batch, 8 * K) for batch in (1, 128)]
        cases += [Case(heads, 1, M), Case(heads, 32, 0), Case(heads, 8, 128 * K, 4, parts=ALL)]
    fp8 = [(TP1, 1, 128 * K), (TP1, 8, 128 * K), (TP1, 32, 128 * K), (TP1, 1, M), (TP1, 8, M)]
    fp8 += [(TP4, 8, 128 * K), (TP8, 8, 128 * K)]
    cases += [Case(*case, dtype=FLOAT8, parts=ALL) for case in fp8]
    dense = {(batch, context) for batch in (1, 8, 32) for context in (8 * K, 128 * K)}
    dense |= {(1, M), (8, M)}
    cases = [
        replace(case, dense=True)
        if case.heads == TP1 and case.q_len == 1 and (case.batch, case.context) in dense
        else case
        for case in cases
    ]
    return sorted(cases, key=lambda case: not (case.dense or case.aimed))


def graph_seconds(calls: list[Callable[[], Any]], floor: float) -> float:
    """Of one call in a graph of as many as a step has sparse layers, fewer where those take long:
    what starting a graph takes (3 to 7 us) belongs to the step and not to one of its layers.
    """
    rounds = ceil(min(SPARSE_LAYERS, LONG / floor) / len(calls))
    return kernels.graph_seconds(calls, repeats=RUNS, rounds=rounds)


def measure(case: Case, part: str, pools: dict[str, Pool], who: Contestants) -> dict[str, Any]:
    """The record of one part of a case."""
    pool, lengths = pools[case.dtype], case.lengths()
    floor, _ = case.work(part).floor()
    count = steps.copies(case.work("attend" if part == "attend" else "select").bytes)
    batches = [pool.step(case.heads, lengths, q_len=case.q_len, seed=seed) for seed in range(count)]
    ids = [steps.random_blocks(s, case.heads.kv, seed) for seed, s in enumerate(batches)]
    pairs = list(zip(batches, ids, strict=True))
    times: dict[str, float] = {}
    for contestant in who.of(case.dtype):
        contestant.retune()
        verify(contestant, part, *pairs[0], [len(batches[0].q) - 1])
        times[contestant.name] = graph_seconds(
            [make_call(contestant, part, *pair) for pair in pairs], floor
        )
    if part == "attend" and who.ours and case.dtype != FLOAT8:
        gathers = [gathered(who.ours, *pair) for pair in pairs]
        times["gather, then dense"] = graph_seconds(gathers, floor)
    if part == "total" and case.dense:
        times |= dense_times(batches[0], who)
        if case.dtype == FLOAT8:
            bf16 = pools["bfloat16"].step(case.heads, lengths, q_len=case.q_len)
            times |= {f"{k}, bf16": t for k, t in dense_times(bf16, who).items()}
    shared = steps.shared_pages(lengths, pool)
    ours = who.ours.name if who.ours else ""
    return make_record(PARTS[part], case.describe(shared), times, ours, case.work(part), RUNS)


def gathered(ours: Any, s: Step, ids: Tensor) -> Callable[[], Any]:
    """Copy the blocks, then attend to the copies with our dense kernel."""
    copy, pages, lengths = gather_blocks(s, ids)
    rows = len(lengths)
    first = torch.arange(rows + 1, dtype=torch.int32, device=s.q.device)
    table = torch.arange(len(pages), dtype=torch.int32, device=s.q.device).view(-1, TOP_K)
    copies = replace(
        s,
        batch=Batch(first, lengths, table, rows, rows, 1, len(pages)),
        q=s.q.view(rows, -1, HEAD),
        kv_cache=pages,
        longest=TOP_K * BLOCK,
        lengths=(TOP_K * BLOCK,) * rows,
        counts=(1,) * rows,
    )
    attend = ours.dense(copies)
    copy()
    steps.check_attention(attend(), s, len(s.q) - 1, ids)
    return lambda: (copy(), attend())


def dense_times(s: Step, who: Contestants) -> dict[str, float]:
    """Attention over the whole context: FlashAttention-3 and our own dense kernel."""
    times = {}
    for name, contestant in (("our dense kernel", who.ours), ("FlashAttention-3", who.fa3)):
        if contestant:
            call = contestant.dense(s)
            limit = 0.01 if s.kv_cache.dtype == torch.bfloat16 else 0.05  # e4m3 weights in FA3
            steps.check_attention(call(), s, len(s.q) - 1, limit=limit)
            times[name] = kernels.graph_seconds([call], repeats=5, rounds=2)
    return times


def captured_lengths(pool: Pool, who: Contestants) -> dict[str, Any]:
    """The record of a graph that allows for 1 M tokens and runs a batch of 8k."""
    case, times = Case(TP1, 1, 8 * K), {}
    for contestant in who.of("bfloat16"):
        for longest, name in ((8 * K, f"{contestant.name}, captured for 8k"), (M, contestant.name)):
            batches = [
                pool.step(case.heads, case.lengths(), longest=longest, seed=seed)
                for seed in range(steps.MOST_COPIES)
            ]
            ids = steps.random_blocks(batches[0], case.heads.kv)
            contestant.retune()
            calls = [make_call(contestant, "total", s, ids) for s in batches]
            times[name] = graph_seconds(calls, case.work("total").floor()[0])
    ours = who.ours.name if who.ours else ""
    described = case.describe(False) | {"captured_for": M}
    return make_record(PARTS["total"], described, times, ours, case.work("total"), RUNS)


def run(cases: Sequence[Case], who: Contestants, limit: float = inf) -> int:
    """Measure, record and print, with no new case after `limit` seconds; 1 if a case failed."""
    pools = {"bfloat16": Pool.random(POOL_PAGES)}
    table, failed = Table(TARGETS), 0
    for case in cases:
        if table.seconds() > limit:
            break
        if case.dtype not in pools:
            pools[case.dtype] = pools["bfloat16"].fp8()
        for part in case.parts:
            try:
                record = measure(case, part, pools, who)
            except (AssertionError, RuntimeError) as error:
                record = {"bench": PARTS[part], "case": case.describe(False), "error": str(error)}
                failed += 1
                still_usable()
            append_record(PARTS[part], record, kernels.versions())
            table.line((*case.key, part), record)
    record = captured_lengths(pools["bfloat16"], who)
    append_record(record["bench"], record, kernels.versions())
    table.line(None, record)
    return int(failed > 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, record and print every case."""
    return command("decode", QUICK, full, run, argv)


if __name__ == "__main__":
    sys.exit(main())
