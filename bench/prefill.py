"""Times MSA prefill on one GPU: index scoring and selection, inversion, attention.

    python -m m3trt.bench.prefill [--peers FOLDER] [--quick]

Random caches on shuffled pages; selections at random and as trained models make them; graph replay,
median. Several tokens of every result are first compared with fp32. Appends to
results/prefill_index_select.jsonl, prefill_invert.jsonl, prefill_attention.jsonl and
prefill_total.jsonl. With FOLDER (see m3trt.bench.peers) the kernels of vLLM, SGLang and
FlashAttention run beside ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

import torch
from m3trt.bench import kernel_library as kernels
from m3trt.bench import msa_steps as steps
from m3trt.bench.kernel_library import BLOCK, HEAD
from m3trt.bench.msa_bench import (
    Contestants,
    Table,
    Work,
    command,
    elapsed,
    make_call,
    make_record,
    still_usable,
    verify,
)
from m3trt.bench.msa_steps import TOP_K, TP1, TP4, TP8, Heads, Pool, Step
from m3trt.bench.records import append_record

POOL_PAGES = 16_640  # 1 M tokens and two chunks
K, M = 1024, 1 << 20
PARTS = {
    "select": "prefill_index_select",
    "invert": "prefill_invert",
    "attend": "prefill_attention",
    "total": "prefill_total",
}
SELECTIONS = {"random": steps.random_blocks, "clustered": steps.realistic_blocks}
RUNS, LONG = 3, 20e-3
GRAPH_SECONDS, MOST_COPIES = 2e-3, 12
"""A graph runs at least so long, or what its launch costs would count; short calls of it take turns
on steps with pages and queries of their own."""


@dataclass(frozen=True)
class Case:
    """Chunks of `new` tokens on prefixes."""

    heads: Heads
    new: tuple[int, ...]
    prefix: tuple[int, ...]
    parts: tuple[str, ...] = ("select", "invert", "attend", "total")
    dense: bool = True

    @property
    def lengths(self) -> list[int]:
        return [a + b for a, b in zip(self.new, self.prefix, strict=True)]

    def work(self, part: str) -> Work:
        """Index keys, queries, chosen blocks, output once; the products of what is visible."""
        tokens, keys = sum(self.new), sum(self.lengths)
        scores = attended = 0.0
        for new, prefix in zip(self.new, self.prefix, strict=True):
            position = torch.arange(prefix, prefix + new, dtype=torch.float64)
            earlier = torch.div(position, BLOCK, rounding_mode="floor").clamp(max=TOP_K - 1)
            scores += float((position + 1).sum())
            attended += float((earlier * BLOCK + position % BLOCK + 1).sum())
        lists = tokens * self.heads.kv * TOP_K * 4
        heads, read = self.heads, 2 * HEAD  # bytes of one head's row
        chosen = min(keys, tokens * TOP_K * BLOCK)
        works = {
            "select": Work(
                read * (keys + tokens * heads.index) + lists, 2 * HEAD * heads.index * scores
            ),
            "attend": Work(
                read * 2 * (chosen * heads.kv + tokens * heads.q), 4 * HEAD * heads.q * attended
            ),
            "invert": Work(2 * lists),
        }
        return works[part] if part != "total" else works["select"] + works["attend"]

    def describe(self, selection: str) -> dict[str, Any]:
        """`case` of the record."""
        one = len(self.new) == 1
        return {
            "new": self.new[0] if one else str(list(self.new)),
            "prefix": self.prefix[0] if one else str(list(self.prefix)),
            "q_heads": self.heads.q,
            "kv_heads": self.heads.kv,
            "index_heads": self.heads.index,
            "dtype": "bfloat16",
            **({"selection": selection} if selection else {}),
        }


def one(heads: Heads, new: int, prefix: int, **more: Any) -> Case:
    return Case(heads, (new,), (prefix,), **more)


MIXED = (
    Case(TP1, (332, 2980, 12928), (116864, 108032, 9984)),
    Case(TP1, (345, 803, 1874), (11264, 11648, 10624)),
)
MAIN = (
    *(one(TP1, new, prefix) for new, prefix in ((8 * K, 0), (16 * K, 31360), (16 * K, 128 * K))),
    one(TP1, 512, M),
)
QUICK = (*MAIN, one(TP1, 8 * K, 61440), one(TP4, 2 * K, 64 * K), MIXED[0])

MS = 1e-3
TARGETS = {
    (TP1, (512,), (M,), "select"): 1.4 * MS,
    **{
        (TP1, (new,), (prefix,), "total"): t * MS
        for new, prefix, t in (
            (8 * K, 0, 1.55),
            (16 * K, 31360, 4.6),
            (16 * K, 128 * K, 7.9),
            (8 * K, 61440, 3.0),
        )
    },
    **{
        (TP4, (new,), (prefix,), "total"): t * MS
        for new, prefix, t in (
            (2 * K, 64 * K, 0.27),
            (16 * K, 31360, 1.15),
            (16 * K, 128 * K, 1.95),
        )
    },
}
"""Seconds that our kernels should reach: heads, new tokens, prefix, part."""


def full() -> list[Case]:
    """Every case that the project's targets name, first, and those around them."""
    cases = [*MAIN, one(TP1, 8 * K, 61440)]
    for heads in (TP4, TP8):
        cases += [
            one(heads, new, prefix, dense=False)
            for new, prefix in ((2 * K, 64 * K), (16 * K, 31360), (16 * K, 128 * K))
        ]
    cases += MIXED
    cases += [
        one(TP1, new, prefix)
        for new, prefix in ((1404, 45440), (338, 74240), (10295, 75520), (16 * K, 157440))
    ]
    cases += [
        one(TP1, new, prefix)
        for new in (512, 16 * K, 8 * K, 2 * K)
        for prefix in (0, 32 * K, 64 * K, 128 * K, 512 * K, M)
    ]
    return list(dict.fromkeys(cases))


def measure(case: Case, pool: Pool, who: Contestants) -> list[dict[str, Any]]:
    """The records of a case."""
    count = min(MOST_COPIES, steps.copies(case.work("attend").bytes))
    batches = [
        pool.step(case.heads, case.lengths, list(case.new), seed=seed) for seed in range(count)
    ]
    chosen = {
        name: [choose(s, case.heads.kv, seed) for seed, s in enumerate(batches)]
        for name, choose in SELECTIONS.items()
    }
    tokens = [0, sum(case.new) // 2, sum(case.new) - 1]
    rows = [
        (part, selection)
        for part in case.parts
        for selection in (chosen if part in ("attend", "invert") else ("",))
    ]
    times: dict[tuple[str, str], dict[str, float]] = {row: {} for row in rows}
    for contestant in who.of("bfloat16"):
        contestant.retune()
        for part, selection in rows:
            pairs = list(zip(batches, chosen[selection or "random"], strict=True))
            if part != "invert":
                verify(contestant, part, *pairs[0], tokens)
                calls = [make_call(contestant, part, *pair) for pair in pairs]
            elif contestant is who.ours:
                calls = [contestant.invert(*pair) for pair in pairs]
            else:
                continue
            times[part, selection][contestant.name] = seconds(calls)
    if case.dense and "total" in case.parts:
        times["total", ""] |= dense_times(batches, who)
    ours = who.ours.name if who.ours else ""
    return [
        make_record(
            PARTS[part],
            case.describe(selection),
            times[part, selection],
            ours,
            case.work(part),
            RUNS,
        )
        for part, selection in rows
    ]


def seconds(calls: list[Callable[[], Any]]) -> float:
    """Of one call, from a graph's replays; of the first alone where that takes long."""
    once = elapsed(calls[0])
    if once > 10 * LONG:
        return once
    if once > LONG:
        return elapsed(calls[0])
    rounds = ceil(GRAPH_SECONDS / (once * len(calls)))
    return kernels.graph_seconds(calls, repeats=RUNS, rounds=rounds)


def dense_times(batches: Sequence[Step], who: Contestants) -> dict[str, float]:
    """Causal attention over all earlier tokens: FlashAttention-3 and our own dense kernel."""
    times = {}
    for name, contestant in (("our dense kernel", who.ours), ("FlashAttention-3", who.fa3)):
        if contestant:
            calls = [contestant.dense(s) for s in batches]
            steps.check_attention(calls[0](), batches[0], len(batches[0].q) - 1)
            times[name] = seconds(calls)
    return times


def run(cases: Sequence[Case], who: Contestants, limit: float = inf) -> int:
    """Measure, record and print, with no new case after `limit` seconds; 1 if a case failed."""
    pool, table, failed = Pool.random(POOL_PAGES), Table(TARGETS), 0
    for case in cases:
        if table.seconds() > limit:
            break
        try:
            records = measure(case, pool, who)
        except (AssertionError, RuntimeError) as error:
            failure = {"case": case.describe(""), "error": str(error)}
            records = [{"bench": PARTS[part]} | failure for part in case.parts]
            failed += 1
            still_usable()
        for record in records:
            append_record(record["bench"], record, kernels.versions())
            part = next(part for part, bench in PARTS.items() if bench == record["bench"])
            table.line((case.heads, case.new, case.prefix, part), record)
    return int(failed > 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, record and print every case."""
    return command("prefill", QUICK, full, run, argv)


if __name__ == "__main__":
    sys.exit(main())
