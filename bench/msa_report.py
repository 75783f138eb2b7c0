"""Tables of MSA for `results/README.md`: every case of every part, and what ran beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from m3trt.bench import decode, floors, prefill
from m3trt.bench.msa_steps import Heads
from m3trt.bench.records import Record, duration, wrapped

PEERS = ("vLLM 0.24.0", "SGLang 0.5.16")
DENSE = "FlashAttention-3"
OUR_DENSE = "our dense kernel"
OTHERS = (*PEERS, DENSE)
"""What a part of ours is compared with; all else that ran beside it is ours too."""
TITLES = {
    "decode_total": "MSA of a decode step: index, selection and attention in one chain",
    "decode_index_select": "MSA of a decode step: index scoring and selection alone",
    "decode_attention": "MSA of a decode step: sparse attention alone",
    "prefill_total": "MSA of a prefill chunk: index, selection and attention in one chain",
    "prefill_index_select": "MSA of a prefill chunk: index scoring and selection alone",
    "prefill_attention": "MSA of a prefill chunk: sparse attention alone",
    "prefill_invert": "MSA of a prefill chunk: inversion of the selection alone",
}
PICTURES = {
    "msa_decode.png": "Time of a decode step's MSA over the context",
    "msa_prefill.png": "Time of a prefill chunk's MSA over its prefix",
    "msa_roofline.png": "Roofline of the MSA kernels",
}


def order(record: Record) -> tuple[Any, ...]:
    """Whole model before ranks, bf16 before e4m3, then by length and batch; ragged ones last."""
    case = record["case"]
    context = case.get("context", case.get("prefix"))
    long = context if isinstance(context, int) else 1 << 40
    few = case.get("batch", case.get("new"))
    return (
        -case["q_heads"],
        case["dtype"],
        case.get("q_len", 1),
        long,
        few if isinstance(few, int) else 0,
        -ord(case.get("selection", "r")[0]),
    )


def target(bench: str, case: Record) -> float | None:
    """Seconds that were asked of our kernels before they were written."""
    heads = Heads(case["q_heads"], case["kv_heads"], case["index_heads"])
    if case["dtype"] != "bfloat16" or "captured_for" in case:
        return None
    if bench in decode.PARTS.values():
        part = next(key for key, name in decode.PARTS.items() if name == bench)
        shape = (heads, case["batch"], case.get("context", 0), case["q_len"], part)
        return decode.TARGETS.get(shape)
    part = next(key for key, name in prefill.PARTS.items() if name == bench)
    return prefill.TARGETS.get((heads, (case["new"],), (case["prefix"],), part))


def named(case: Record) -> str:
    """E.g. `batch 8 on 131,072`, `512 on 1,048,576`."""
    first = f"batch {case['batch']}" if "batch" in case else _count(case["new"])
    where = case.get("context", case.get("prefix", case.get("lengths")))
    more = [] if case["q_heads"] == 64 else [f"{case['q_heads']}/{case['kv_heads']} heads"]
    more += [f"{case['q_len']} query tokens"] if case.get("q_len", 1) > 1 else []
    more += [f"{case['selection']} selection"] if "selection" in case else []
    return f"{first} on {_count(where)}" + (f" ({', '.join(more)})" if more else "")


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def beside(record: Record, name: str) -> str:
    """Time of a contestant and, in brackets, what it is of ours."""
    if name not in record.get("baselines", {}):
        return "-"
    other, own = record["baselines"][name], record.get("seconds")
    return duration(other) + (f" ({other / own:.2f}x)" if own else "")


def share(record: Record) -> str:
    """How much of the time of ours is the floor."""
    seconds, floor = record.get("seconds"), record.get("floor_seconds")
    return f"{floor / seconds:.0%}" if seconds and floor else "-"


def note(records: Sequence[Record]) -> str:
    """Where and of what they were taken."""
    devices = ", ".join(sorted({record["device"] for record in records}))
    commits = ", ".join(sorted({record["commit"] for record in records}))
    return f"{devices}; commit {commits}"


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table without the columns in which no row has anything."""
    kept = [i for i in range(len(titles)) if any(row[i] != "-" for row in rows)]
    grid = [titles, ["---"] * len(titles), *rows]
    return "".join("| " + " | ".join(line[i] for i in kept) + " |\n" for line in grid)


def table(bench: str, records: Sequence[Record]) -> str:
    """One line a case: ours, what was asked, the floor, the peers, all else that was timed."""
    rows = sorted((r for r in records if "captured_for" not in r["case"]), key=order)
    where = ["batch", "context"] if bench.startswith("decode") else ["new", "prefix"]
    where += [key for key in ("q_len", "selection") if key in rows[0]["case"]]
    titles = ["heads", "caches", *where, "ours", "asked", "floor", "floor / ours", *PEERS]
    titles += [f"dense {DENSE}", "also ours"]
    grid = []
    for record in rows:
        case = {"context": record["case"].get("lengths")} | record["case"]
        cells = [f"{case['q_heads']}/{case['kv_heads']}/{case['index_heads']}"]
        cells += ["bf16" if case["dtype"] == "bfloat16" else "e4m3"]
        cells += [_count(case[key]) for key in where]
        cells[2] += " (shared pages)" if case.get("shared_pages") else ""
        asked = target(bench, case)
        cells += [record.get("error") or duration(record.get("seconds")), duration(asked)]
        cells += [duration(record.get("floor_seconds")), share(record)]
        cells += [beside(record, name) for name in OTHERS]
        rest = {k: v for k, v in record.get("baselines", {}).items() if k not in OTHERS}
        cells += ["; ".join(f"{name} {duration(time)}" for name, time in rest.items()) or "-"]
        grid.append(cells)
    titles = [title.replace("q_len", "query tokens") for title in titles]
    return f"### {TITLES[bench]}\n\n{note(rows)}\n\n{markdown(titles, grid)}"


def slower(records: dict[str, list[Record]]) -> list[str]:
    """Every case in which something that is not ours was faster."""
    found = []
    for bench, title in TITLES.items():
        for record in sorted(records[bench], key=order):
            for name, seconds in record.get("baselines", {}).items():
                if name in OTHERS and seconds < record.get("seconds", 0):
                    ratio = f"{seconds / record['seconds']:.2f}x the speed of {name}"
                    part = title.split(": ")[1]
                    found.append(f"{part}, {named(record['case'])}: {ratio}")
    return found


def targets(records: dict[str, list[Record]]) -> tuple[int, list[str]]:
    """How many of the measured cases had a target, and those that missed it."""
    count, missed = 0, []
    for bench, title in TITLES.items():
        for record in sorted(records[bench], key=order):
            asked = target(bench, record["case"])
            if asked and record.get("seconds"):
                count += 1
                if record["seconds"] > asked:
                    times = f"{duration(record['seconds'])}, asked {duration(asked)}"
                    missed.append(f"{title.split(': ')[1]}, {named(record['case'])}: {times}")
    return count, missed


def dense_records(totals: Iterable[Record]) -> list[Record]:
    """Of whole steps beside which our dense kernel and FlashAttention-3 ran: records of these two,
    like those of `paged_attention`."""
    found = []
    for record in totals:
        case, times = record["case"], record.get("baselines", {})
        chunks = isinstance(case.get("new"), str)  # several: their floor is not known here
        if chunks or "captured_for" in case or not {OUR_DENSE, DENSE} <= times.keys():
            continue
        kept = ("batch", "context", "new", "prefix", "q_heads", "kv_heads", "q_len", "dtype")
        phase = "decode" if "batch" in case else "prefill"
        floor, own = floors.dense_attention(case), times[OUR_DENSE]
        made = {
            "case": {key: case[key] for key in kept if key in case} | {"phase": phase},
            "seconds": own,
            "floor_seconds": floor.seconds,
            "bound": floor.unit,
            "rate": floor.amount / own / 1e12,
            "rate_unit": "TB/s" if floor.unit == "bytes" else "TFLOP/s",
            "baselines": {DENSE: times[DENSE]},
        }
        found.append(record | made)
    return found


def captured_sentence(records: Sequence[Record]) -> str:
    """What a graph costs that allows for longer contexts than it meets."""
    record = records[-1]
    times = {"ours": record["seconds"], **record["baselines"]}
    parts = [
        f"{name} {duration(times[name])}, captured for 8k {duration(other)}"
        for name in list(times)
        if (other := times.get(f"{name}, captured for 8k"))
    ]
    text = f"A graph captured for 1 M tokens, on a batch of one and 8k: {'; '.join(parts)}."
    return wrapped(text)


def fp8_table(records: Sequence[Record]) -> str:
    """What e4m3 caches change."""
    titles = ("data", "context", "same blocks chosen", "output differs, same blocks", "own blocks")
    rows = []
    for r in records:
        figures = (r["selection_overlap"], r["attention_error"], r["total_error"])
        shown = (f"{figure:.1%}" for figure in figures)
        rows.append([r["case"]["data"], _count(r["case"]["context"]), *shown])
    title = "e4m3 index and KV caches beside bf16 ones"
    return f"### {title}\n\n{note(records)}\n\n{markdown(titles, rows)}"


def bullets(title: str, lines: Sequence[str]) -> str:
    """A heading over a list."""
    return f"### {title}\n\n" + "".join(f"* {line}\n" for line in lines)


def sections(records: dict[str, list[Record]], folder: Path) -> list[str]:
    """Tables and pictures of what has been recorded; `folder` is that of the pictures."""
    parts = []
    if behind := slower(records):
        parts.append(bullets("MSA cases in which something else was faster", behind))
    count, missed = targets(records)
    if count:
        title = (
            f"Targets of MSA: {count - len(missed)} of {count} measured ones reached, missed are"
        )
        parts.append(bullets(title, missed or ["none"]))
    for bench in TITLES:
        if records[bench]:
            parts.append(table(bench, records[bench]))
        captured = [r for r in records[bench] if "captured_for" in r["case"]]
        parts += [captured_sentence(captured)] if captured else []
    if records["fp8_effect"]:
        parts.append(fp8_table(records["fp8_effect"]))
    pictures = [f"![{text}]({name})" for name, text in PICTURES.items() if (folder / name).exists()]
    return [*(["\n".join(pictures) + "\n"] if pictures else []), *parts]
