"""The README's speed section: what a newcomer wants to know first, from `bench/results/*.jsonl`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from m3trt.bench import msa_report, step_report
from m3trt.bench.records import RESULTS, Record, duration, load, load_all, tokens, wrapped

PLAIN_MSA = "39bafd6b8bbe"
"""The last commit recorded with the plain MSA kernels."""
LAYERS = 60
"""Of the released model; each has two all-reduces."""
TP1 = {"q_heads": 64, "kv_heads": 4, "dtype": "bfloat16"}
BATCHES, CONTEXTS = (1, 8, 32), (8192, 131072, 1 << 20)
CHUNKS = ((8192, 0), (8192, 61440), (16384, 31360), (16384, 131072), (512, 1 << 20))
VLLM_MOE = "vllm fused_moe_kernel, GEMMs alone"


def steps(records: Iterable[Record]) -> list[Record]:
    """Without what is no step of the model: building and loading a slice."""
    return [record for record in records if record["case"].get("step") not in ("build", "load")]


def routing_sentence(records: Iterable[Record]) -> str:
    """Which steps read fewer experts than random routing needs."""
    herded = sorted({r["commit"] for r in steps(records) if "router_bias" not in r})
    if not herded:
        return ""
    return (
        f"Steps of {', '.join(herded)} ran with router biases of 0.1 instead of 0.001, which made"
        " tokens agree: of 29, 82 and 126 experts that 8, 32 and 128 tokens need at random they"
        " read some 22, 48 and 68, so that later steps do more work."
    )


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


def attention_sentence(records: Sequence[Record]) -> str:
    """Sparse attention of a chunk alone, by how the selections of neighbouring tokens differ."""
    parts = []
    for selection in ("random", "clustered"):
        texts = []
        for new, prefix in CHUNKS:
            case = {"new": new, "prefix": prefix, "selection": selection}
            record = find(records, **case, **TP1)
            if record and (vllm := record["baselines"].get(msa_report.PEERS[0])):
                own = f"{duration(record['seconds'])} ({vllm / record['seconds']:.2f}x)"
                texts.append(f"{tokens(new)} on {tokens(prefix)} {own}")
        if texts:
            parts.append(f"{selection} selections {', '.join(texts)}")
    if not parts:
        return ""
    text = "; ".join(parts)
    return f"**Sparse attention of a prefill chunk alone** (vLLM's time over ours): {text}."


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
        own = ", ".join(map(_with_gemms, rows))
        parts.append(f"TP {tp_size}: {own}; vLLM {', '.join(map(beside, rows))}")
    text = ". ".join(parts)
    if "†" in text:
        text += " (†: of an earlier run)"
    return (
        f"**Mixture of experts**, one layer at batch {', '.join(map(str, BATCHES))} (floor / ours)"
        f" beside vLLM's two GEMMs without the rest: {text}."
    )


def _with_gemms(record: Record) -> str:
    """E.g. `303 us (81 %, its GEMMs 285 us)`."""
    gemms = record.get("gemms_seconds")
    alone = f", its GEMMs {duration(gemms)}" if gemms else ""
    return f"{duration(record['seconds'])} ({msa_report.share(record)}{alone})"


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f}x to {max(ratios):.2f}x"


def dense(results: Path = RESULTS) -> list[Record]:
    """Our dense kernel beside FlashAttention-3."""
    totals = ("decode_total", "prefill_total")
    return msa_report.dense_records(r for bench in totals for r in load(bench, results))


def dense_sentence(records: Sequence[Record]) -> str:
    """Dense attention beside FlashAttention-3 and beside cuDNN, which ran apart."""

    def ratios(name: str, phase: str, dtype: str) -> list[float]:
        wanted = {"phase": phase, "dtype": dtype}
        return [
            record["baselines"][name] / record["seconds"]
            for record in records
            if wanted.items() <= record["case"].items()
            and record["case"].get("kernel") != "smxx"
            and name in record["baselines"]
        ]

    fa3 = msa_report.DENSE
    parts = (
        ("decode {} the speed of " + fa3, ratios(fa3, "decode", "bfloat16")),
        ("with e4m3 caches {}", ratios(fa3, "decode", "float8_e4m3")),
        ("prefill {}", ratios(fa3, "prefill", "bfloat16")),
        ("and {} of cuDNN's", ratios("torch cuDNN SDPA", "prefill", "bfloat16")),
    )
    return (
        "**Dense attention**: "
        + ", ".join(text.format(_range(found)) for text, found in parts if found)
        + "."
    )


class Eras(NamedTuple):
    """Records of steps, each list newest first."""

    plain: list[Record]
    """Of `PLAIN_MSA`."""
    exchanged: list[Record]
    """Of later libraries with the plain MSA kernels in place of the fast ones."""
    now: list[Record]
    """All others since."""


def eras(records: Sequence[Record]) -> Eras:
    """Apart what ran with the plain MSA kernels."""
    newest = steps(records)[::-1]
    plain = [record for record in newest if record["commit"] == PLAIN_MSA]
    since = newest[: newest.index(plain[0])] if plain else newest
    exchanged = [record for record in since if "msa_kernels" in record["case"]]
    return Eras(plain, exchanged, [record for record in since if record not in exchanged])


def rank_sentence(found: Eras) -> str:
    """Whether the TP 8 rank was recorded with the kernels of now."""
    if find(found.now, model="rank"):
        return ""
    return f"The TP 8 rank was recorded only with the plain MSA kernels, at {PLAIN_MSA}."


def _arrow(parts: Iterable[Iterable[Record]], **wanted: object) -> str:
    """`before → after` of the case in each part."""
    found = [find(part, **wanted) for part in parts]
    return " → ".join(duration(record["seconds"] if record else None) for record in found)


def two_gpus_sentence(records: Sequence[Record]) -> str:
    """The slice on one GPU and on two, both as they were at one commit."""
    both = find(records, model="slice", tp_size=2, bench="tensor_parallel")
    if both is None:
        return ""
    same = [record for record in records if record["commit"] == both["commit"]]
    sizes = [[r for r in same if r["case"]["tp_size"] == size] for size in (1, 2)]
    wanted = {"bench": "tensor_parallel", "step": "decode", "context": 61440}
    decode = ", ".join(_arrow(sizes, **wanted, batch=batch) for batch in BATCHES)
    return (
        f"**One GPU → two** (TP 2, NVLink, {both['commit']}): decode of the slice on 60k at batch"
        f" {', '.join(map(str, BATCHES))}: {decode}; prefill of 8k"
        f" {_arrow(sizes, bench='tensor_parallel', step='prefill', context=0)}."
    )


def steps_sentence(found: Eras) -> str:
    """The slice before and after the MSA kernels."""
    parts = [step_report.alone(part, "slice") for part in (found.plain, found.now)]
    long = {"step": "decode", "context": 131072}
    many = {"step": "decode", "context": 8192, "batch": 128}
    at = found.exchanged[0]["commit"] if found.exchanged else None
    same = [record for record in parts[1] if record["commit"] == at]
    decode = ", ".join(_arrow(parts, **long, batch=batch) for batch in BATCHES)
    return (
        f"**Whole steps** of one dense and five sparse layers at TP 1, {PLAIN_MSA} (plain MSA"
        f" kernels) → {parts[1][0]['commit'] if parts[1] else 'none'}. Decode on 128k at batch"
        f" {', '.join(map(str, BATCHES))}: {decode}; prefill of 8k"
        f" {_arrow(parts, step='prefill', context=0)}. Batch 128 on 8k, with nothing but"
        f" the MSA kernels exchanged, at {at}: {_arrow((found.exchanged, same), **many)}."
        f" {herded_before(parts)}"
    ).rstrip()


def herded_before(parts: Sequence[Sequence[Record]]) -> str:
    """Whether the steps on the left of an arrow did less work than those on its right."""
    before, now = (any("router_bias" in record for record in part) for part in parts)
    if before or not now:
        return ""
    return "On the left tokens agreed on fewer experts ([why](bench/README.md)): less work."


def rank_steps_sentence(found: Eras, collectives: Sequence[Record]) -> str:
    """The TP 8 rank before and after, and what its all-reduces would add."""
    rank, parts = {"model": "rank", "context": 61440}, (found.plain, found.now)
    if find([*found.now, *found.plain], **rank) is None:
        return ""
    decode = ", ".join(_arrow(parts, **rank, step="decode", batch=batch) for batch in BATCHES)
    text = (
        f"**One TP 8 rank** with all 60 layers, without its all-reduces: decode on 60k at batch"
        f" {', '.join(map(str, BATCHES))}: {decode}; a chunk of 16k on 60k"
        f" {_arrow(parts, **rank, step='prefill')}."
    )
    if done := find(found.now, **rank, step="generate"):
        text += f" {done['tokens']} tokens one after another: {duration(done['seconds'])} each."
    same = [[record for record in part if record["case"]["model"] == "rank"] for part in parts]
    sentences = (
        text,
        herded_before(same),
        all_reduces_sentence(collectives),
        rank_sentence(found),
    )
    return " ".join(filter(None, sentences))


def all_reduces_sentence(collectives: Sequence[Record]) -> str:
    """What they would add to a step of the rank. A chunk's are those of half as many rows, twice:
    so many rows are all bytes."""
    found = [find(collectives, op="all_reduce", rows=rows) for rows in (*BATCHES, 8192)]
    each = [2 * LAYERS * record["estimates"]["tp 8"] for record in found if record]
    if len(each) < len(found):
        return ""
    return (
        f"Not measured: {2 * LAYERS} all-reduces among eight GPUs, by the time of two as a ring"
        f" {', '.join(map(duration, each[:-1]))} and, of the chunk, {duration(2 * each[-1])}."
    )


def section(results: Path = RESULTS) -> str:
    """All of the text between the README's markers."""
    msa = {bench: load(bench, results) for bench in msa_report.TITLES}
    decode, prefill = msa["decode_total"], msa["prefill_total"]
    found = eras(load_all("slice", results))
    bullets = [
        behind_sentence(msa),
        attention_sentence(msa["prefill_attention"]),
        gemm_sentence(load("gemm", results)),
        moe_sentence(load("moe", results)),
        dense_sentence([*load("paged_attention", results), *dense(results)]),
        steps_sentence(found),
        rank_steps_sentence(found, load("collectives", results)),
        two_gpus_sentence(found.now),
    ]
    picture = "msa_decode.png"
    note = f"{msa_report.note([*decode, *prefill])}; bf16, TP 1; in brackets their time over ours"
    return "\n".join(
        [
            wrapped(f"**MSA of one layer in a decode step** ({note}):"),
            decode_table(decode),
            wrapped("**MSA of one layer in a prefill chunk**:"),
            prefill_table(prefill),
            "".join(wrapped(f"* {text}", "  ") for text in bullets if text),
            f"![{msa_report.PICTURES[picture]}](bench/results/{picture})\n",
            "All cases, e4m3 caches, ranks, commits: [bench/results](bench/results/README.md).\n",
        ]
    )
