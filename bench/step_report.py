"""Tables of `results/README.md` beside those of whole steps: each op's part, and the engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from m3trt.bench import msa_report
from m3trt.bench.records import Record, duration, tokens, wrapped

ALONE = {"slice": "The slice at TP 1", "rank": "One TP 8 rank"}
BATCHES = (1, 8, 32)
NOTE = (
    "Kernels may start before those in front have ended (programmatic launch) and wait for them, so"
    " the sum of their times exceeds the step: an op's time is what its kernels add behind the end"
    " of all before, in one profiled step. Records without such times have plain sums{}. Steps"
    " with context run eagerly and have gaps. Rates count the floors' bytes or operations, experts'"
    " weights as random routing is expected to need them; all cuBLASLt kernels are Gemm's."
)


def alone(records: Iterable[Record], model: str) -> list[Record]:
    """What `bench.slice` measured of one model; `bench.tensor_parallel` has a slice of its own."""
    cases = ((record, record["case"]) for record in records)
    return [
        r
        for r, case in cases
        if case.get("model") == model and not case.keys() & {"bench", "msa_kernels"}
    ]


def breakdowns(records: Sequence[Record]) -> str:
    """For both models a table of the ops' times in the longest decode steps and in the chunk."""
    parts, sums = [], set()
    for model, title in ALONE.items():
        steps = [r for r in alone(records, model) if "ops" in r]
        decode = [r for r in steps if r["case"]["step"] == "decode"]
        longest = max((r["case"]["context"] for r in decode), default=0)
        chosen = [
            r
            for batch in BATCHES
            for r in decode
            if (r["case"]["batch"], r["case"]["context"]) == (batch, longest)
        ]
        chosen += [r for r in steps if r["case"]["step"] == "prefill"]
        sums |= {r["commit"] for r in chosen if not _added(r)}
        if chosen:
            parts.append(f"### {title}: the ops of a step\n\n{_above(chosen)}\n{_ops(chosen)}")
    note = NOTE.format(f" ({', '.join(sorted(sums))})" if sums else "")
    return "\n".join(parts) + (f"\n{wrapped(note)}" if parts else "")


def _added(record: Record) -> bool:
    return all("added_seconds" in op for op in record["ops"].values())


def _times(record: Record) -> dict[str, float]:
    """Seconds by op."""
    field = "added_seconds" if _added(record) else "seconds"
    return {op: part[field] for op, part in record["ops"].items()}


def _above(records: Sequence[Record]) -> str:
    commits = ", ".join(sorted({record["commit"] for record in records}))
    devices = ", ".join(sorted({record["device"] for record in records}))
    return f"{devices}; commit {commits}; in brackets shares of the sum\n"


def _ops(records: Sequence[Record]) -> str:
    times = [_times(record) for record in records]
    sums = [sum(each.values()) for each in times]
    shares: dict[str, float] = {}
    for each, total in zip(times, sums, strict=True):
        for op, seconds in each.items():
            shares[op] = max(shares.get(op, 0.0), seconds / total)
    rows = [
        [op, *(_op(record, op) for record in records)]
        for op in sorted(shares, key=lambda op: -shares[op])
    ]
    rows.append(["sum of the ops", *map(duration, sums)])
    step = [f"{duration(r['seconds'])}, floor {duration(r['floor_seconds'])}" for r in records]
    rows.append(["**step**", *step])
    if any("experts" in record for record in records):
        rows.append(["distinct experts a layer", *map(_experts, records)])
    return msa_report.markdown(("op", *map(_title, records)), rows)


def _title(record: Record) -> str:
    case = record["case"]
    if case["step"] == "decode":
        return f"decode, batch {case['batch']} on {tokens(case['context'])}"
    return f"prefill, {tokens(case['new'])} on {tokens(case['context'])}"


def _op(record: Record, op: str) -> str:
    """E.g. `1.02 ms (55%), 3.9 TB/s, 860 us`."""
    times = _times(record)
    if op not in times:
        return "-"
    parts = [f"{duration(times[op])} ({times[op] / sum(times.values()):.1%})"]
    if work := record.get("work", {}).get(op):
        unit = "TB/s" if work["unit"] == "bytes" else "TFLOP/s"
        parts.append(f"{work['amount'] / times[op] / 1e12:.3g} {unit}")
    if floor := record["floors"].get(op):
        parts.append(f"floor {duration(floor)}")
    return ", ".join(parts)


def _experts(record: Record) -> str:
    if "experts" not in record:
        return "-"
    found = record["experts"]
    return f"{found['emulated']:.1f}, at random {found['expected']:.1f}"


def engines(records: Sequence[Record]) -> str:
    """What building the engines of these steps took and what they fill."""
    rows = []
    for model, title in ALONE.items():
        made = {r["case"]["step"]: r for r in alone(records, model)}
        if not {"build", "load"} <= made.keys():
            continue
        build, fill = made["build"], made["load"]
        rows.append(
            [
                f"{title}, {build['case']['layers']} layers",
                duration(build["seconds"]),
                f"{build['peak_rss_gb']:.2f} GB",
                f"{build['engine_mb']:.1f} MB",
                duration(fill["seconds"]),
                *(f"{fill[part]:.1f} GB" for part in ("weights_gb", "caches_gb", "scratch_gb")),
                build["commit"],
            ]
        )
    titles = ("engine", "build", "host memory", "file", "fill", "weights", "caches", "scratch")
    note = "Fill: random weights and caches, made on the GPU. Loading from a file is below."
    table = msa_report.markdown((*titles, "commit"), rows)
    return f"### Building the engines of these steps\n\n{table}\n{wrapped(note)}" if rows else ""
