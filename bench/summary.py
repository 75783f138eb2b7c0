"""The README's speed section: what a newcomer wants to know first, from `bench/results/*.jsonl`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from m3trt.bench import msa_report
from m3trt.bench.records import RESULTS, Record, duration, load, load_all, tokens, wrapped

PLAIN_MSA = "39bafd6b8bbe"
"""The last commit recorded with the plain MSA kernels."""
TP1 = {"q_heads": 64, "kv_heads": 4, "dtype": "bfloat16"}
BATCHES, CONTEXTS = (1, 8, 32), (8192, 131072, 1 << 20)
CHUNKS = ((8192, 0), (8192, 61440), (16384, 31360), (16384, 131072), (512, 1 << 20))
VLLM_MOE = "vllm fused_moe_kernel, GEMMs alone"


def steps(records: Iterable[Record]) -> list[Record]:
    """Without what is no step of the model: building and loading a slice."""
    return [record for record in records if record["case"].get("step") not in ("build", "load")]


def find(records: Iterable[Record], **wanted: object) -> Record | None:
    """The measured record whose case has these values."""
    for record in records:
        case = record["case"]
        if record.get("seconds") and "captured_for" not in case and wanted.items() <= case.items():
            return record
    return None


def _peers(record: Record) -> list[str]:
    return [msa_report.beside(record, name) for name in msa_report.OTHERS]


def decode_table(records: Sequence[Record]) -> str:
    """MSA of one layer and one decode step."""
    rows = []
    for context in CONTEXTS:
        for batch in BATCHES:
            if record := find(records, context=context, batch=batch, q_len=1, **TP1):
                own = [duration(record["seconds"]), msa_report.share(record)]
                many = f"{batch} (shared pages)" if record["case"]["shared_pages"] else f"{batch}"
                rows.append([tokens(context), many, *own, *_peers(record)])
    return msa_report.markdown(("context", "batch", *_titles()), rows)


def prefill_table(records: Sequence[Record]) -> str:
    """MSA of one layer and one prefill chunk."""
    rows = []
    for new, prefix in CHUNKS:
        if record := find(records, new=new, prefix=prefix, **TP1):
            own = [duration(record["seconds"]), msa_report.share(record)]
            rows.append([f"{tokens(new)} on {tokens(prefix)}", *own, *_peers(record)])
    return msa_report.markdown(("new tokens", *_titles()), rows)


def _titles() -> list[str]:
    return ["ours", "floor / ours", *msa_report.PEERS, f"dense {msa_report.DENSE}"]


def behind_sentence(records: dict[str, list[Record]]) -> str:
    """Where MSA is slower than something else, and how many targets it missed."""
    slow = msa_report.slower(records)
    count, missed = msa_report.targets(records)
    return (
        f"**MSA is slower than a peer** in {'; in '.join(slow) or 'no case'}."
        f" {len(missed)} of {count} targets, set before the kernels were written, are missed"
        " ([which](bench/results/README.md))."
    )


def gemm_sentence(records: Sequence[Record]) -> str:
    """How all projections compare with torch."""
    ratios = [record["baselines"]["torch.matmul"] / record["seconds"] for record in records]
    return (
        f"**Gemm**: {min(ratios):.2f}x to {max(ratios):.2f}x the speed of `torch.matmul` in"
        f" {len(ratios)} cases: every projection of M3 at TP 1 and 4, 1 to 8,192 rows."
    )


def moe_sentence(records: Sequence[Record]) -> str:
    """Ours, how much of it is the floor, vLLM's two GEMMs."""

    def beside(record: Record) -> str:
        if VLLM_MOE in record["baselines"]:
            return duration(record["baselines"][VLLM_MOE])
        return duration(record.get("earlier_baselines", {}).get(VLLM_MOE)) + "†"

    parts = []
    for tp_size in (1, 8):
        found = [find(records, tp_size=tp_size, batch=batch) for batch in BATCHES]
        rows = [record for record in found if record]
        own = ", ".join(f"{duration(r['seconds'])} ({msa_report.share(r)})" for r in rows)
        parts.append(f"TP {tp_size}: {own}; vLLM {', '.join(map(beside, rows))}")
    return (
        f"**Mixture of experts**, one layer at batch {', '.join(map(str, BATCHES))} (floor / ours)"
        f" beside vLLM's two GEMMs without the rest: {'. '.join(parts)} (†: of an earlier run)."
    )


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f}x to {max(ratios):.2f}x"


def dense_sentence(records: Sequence[Record]) -> str:
    """Dense attention beside FlashAttention-3 and cuDNN, each in its own run."""

    def ratios(name: str, step: str, dtype: str) -> list[float]:
        found = []
        for record in records:
            values, beside = record["case"].values(), record.get("baselines") or {}
            if step in values and dtype in values and "smxx" not in values and name in beside:
                found.append(beside[name] / record["seconds"])
        return found

    fa3 = msa_report.DENSE
    return (
        f"**Dense attention**: decode {_range(ratios(fa3, 'decode', 'bfloat16'))} the speed of"
        f" {fa3}, with e4m3 caches {_range(ratios(fa3, 'decode', 'float8_e4m3'))}; prefill"
        f" {_range(ratios(fa3, 'prefill', 'bfloat16'))},"
        f" and {_range(ratios('torch cuDNN SDPA', 'prefill', 'bfloat16'))} of cuDNN's."
    )


def before_and_after(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Records of the last commit with the plain MSA kernels, and all later ones, newest first."""
    last = max((i for i, r in enumerate(records) if r["commit"] == PLAIN_MSA), default=-1)
    plain = [record for record in records if record["commit"] == PLAIN_MSA]
    return steps(plain), steps(records[:last:-1])


def rank_sentence(records: Sequence[Record]) -> str:
    """Whether the TP 8 rank was recorded with the kernels of now."""
    _, later = before_and_after(records)
    if any(record["case"]["model"] == "rank" for record in later):
        return ""
    return f"The TP 8 rank was recorded only with the plain MSA kernels, at {PLAIN_MSA}."


def two_gpus_sentence(records: Sequence[Record]) -> str:
    """The slice on one GPU and on two."""

    def times(**wanted: object) -> str:
        found = [find(records, model="slice", tp_size=size, **wanted) for size in (1, 2)]
        return " → ".join(duration(record["seconds"] if record else None) for record in found)

    if not find(records, model="slice", tp_size=2):
        return ""
    decode = ", ".join(times(step="decode", context=61440, batch=batch) for batch in BATCHES)
    prefill = times(step="prefill", context=0)
    return f" One GPU → two (TP 2): decode on 60k {decode}; prefill of 8k {prefill}."


def steps_sentence(records: Sequence[Record]) -> str:
    """The slice before and after the MSA kernels, the rank."""
    plain, later = before_and_after(records)

    def change(**wanted: object) -> str:
        before, after = (find(part, **wanted) for part in (plain, later))
        times = [record["seconds"] if record else None for record in (before, after)]
        return " → ".join(duration(seconds) for seconds in times)

    one = {"model": "slice", "tp_size": 1}
    wanted = one | {"step": "decode", "context": 131072}
    decode = ", ".join(change(**wanted, batch=batch) for batch in BATCHES)
    commit = later[0]["commit"] if later else "none"
    text = (
        f"**Whole steps** of one dense and five sparse layers at TP 1, {PLAIN_MSA} (plain MSA"
        f" kernels) → {commit}. Decode on 128k at batch {', '.join(map(str, BATCHES))}: {decode};"
        f" prefill of 8k {change(**one, step='prefill', context=0)}."
    )
    text += two_gpus_sentence(later)
    if rank := find([*later, *plain], model="rank", step="decode", batch=1):
        text += (
            f" {rank_sentence(records)} All 60 layers, batch 1 on 60k, all-reduces left out:"
            f" {duration(rank['seconds'])}."
        )
    return text


def section(results: Path = RESULTS) -> str:
    """All of the text between the README's markers."""
    msa = {bench: load(bench, results) for bench in msa_report.TITLES}
    decode, prefill = msa["decode_total"], msa["prefill_total"]
    bullets = [
        behind_sentence(msa),
        gemm_sentence(load("gemm", results)),
        moe_sentence(load("moe", results)),
        dense_sentence(load_all("paged_attention", results)),
        steps_sentence(load_all("slice", results)),
    ]
    picture = "msa_decode.png"
    note = f"{msa_report.note([*decode, *prefill])}; bf16, TP 1; in brackets their time over ours"
    return "\n".join(
        [
            wrapped(f"**MSA of one layer in a decode step** ({note}):"),
            decode_table(decode),
            wrapped("**MSA of one layer in a prefill chunk**:"),
            prefill_table(prefill),
            "".join(wrapped(f"* {text}", "  ") for text in bullets),
            f"![{msa_report.PICTURES[picture]}](bench/results/{picture})\n",
            "All cases, e4m3 caches, ranks, commits: [bench/results](bench/results/README.md).\n",
        ]
    )
