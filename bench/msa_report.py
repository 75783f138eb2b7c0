"""The README's tables of MSA: one line a case, all of its parts and what ran beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]

DECODE = ("decode_index_select", "decode_attention", "decode_total")
PREFILL = ("prefill_index_select", "prefill_attention", "prefill_total")
PEERS = ("vLLM 0.24.0", "SGLang 0.5.16")
DENSE = "FlashAttention-3"
PICTURES = {
    "msa_decode.png": "Time of a decode step's MSA over the context",
    "msa_prefill.png": "Time of a prefill chunk's MSA over its prefix",
    "msa_roofline.png": "Roofline of the MSA kernels",
}


def case_key(case: Record) -> tuple[Any, ...]:
    """What the parts of one case have in common."""
    names = (
        "q_heads",
        "kv_heads",
        "batch",
        "context",
        "lengths",
        "q_len",
        "dtype",
        "new",
        "prefix",
    )
    return tuple(case.get(name) for name in names)


def _by_case(records: Sequence[Record], **wanted: Any) -> dict[tuple[Any, ...], Record]:
    chosen = (r for r in records if wanted.items() <= r["case"].items())
    return {case_key(record["case"]): record for record in chosen}


def duration(seconds: float | None) -> str:
    """E.g. `12.3 us`, `4.56 ms`; a dash where nothing was measured."""
    if seconds is None:
        return "-"
    value, unit = (seconds * 1e6, "us") if seconds < 1e-3 else (seconds * 1e3, "ms")
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


def _beside(record: Record | None, name: str) -> str:
    if record is None or name not in record.get("baselines", {}):
        return "-"
    other, own = record["baselines"][name], record.get("seconds")
    return duration(other) + (f" ({other / own:.2f}x)" if own else "")


def _seconds(record: Record | None) -> str:
    if record is None:
        return "-"
    return str(record.get("error") or duration(record.get("seconds")))


def _note(records: Sequence[Record]) -> str:
    devices = ", ".join(sorted({record["device"] for record in records}))
    commits = ", ".join(sorted({record["commit"] for record in records}))
    return f"{devices}; bfloat16; commit {commits}"


def _in_table(case: Record) -> bool:
    """All of the whole model, of the ranks what has 128k tokens; the records hold the rest."""
    if case["dtype"] != "bfloat16" or "captured_for" in case:
        return False
    return case["q_heads"] == 64 or case.get("context") == 131072


def decode_table(records: dict[str, list[Record]]) -> str:
    """Index scoring and selection, attention, and both in one chain."""
    known = [record for bench in DECODE for record in records[bench] if _in_table(record["case"])]
    parts = [_by_case([r for r in known if r["bench"] == bench]) for bench in DECODE]
    cases = {case_key(record["case"]): record["case"] for record in known}
    lines = [
        f"**MSA decode, one layer** ({_note(known)})\n",
        "| heads | batch | context | query tokens | index + select | attention | both | floor"
        " | vLLM | SGLang | dense FlashAttention-3 |",
        "| --- " * 11 + "|",
    ]
    for key, case in cases.items():
        select, attend, total = (part.get(key) for part in parts)
        whole = total or attend or select
        context = f"{case['context']:,}" if "context" in case else case["lengths"]
        floor = duration(whole.get("floor_seconds") if whole else None)
        heads = f"{case['q_heads']}/{case['kv_heads']}/{case['index_heads']}"
        cells = [heads, case["batch"], context, case["q_len"]]
        cells += [_seconds(select), _seconds(attend), _seconds(total), floor]
        cells += [_beside(whole, name) for name in (*PEERS, DENSE)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def prefill_table(records: dict[str, list[Record]]) -> str:
    """The same for chunks; attention over random and over clustered selections."""
    select, total = (_by_case(records[bench]) for bench in (PREFILL[0], PREFILL[2]))
    attend = [_by_case(records[PREFILL[1]], selection=name) for name in ("random", "clustered")]
    known = [record for bench in PREFILL for record in records[bench]]
    cases = {case_key(record["case"]): record["case"] for record in known}
    lines = [
        f"**MSA prefill, one layer** ({_note(known)})\n",
        "| heads | new | prefix | index + select | attention, random / clustered | both | floor"
        " | vLLM | SGLang | dense FlashAttention-3 |",
        "| --- " * 10 + "|",
    ]
    for key, case in cases.items():
        whole = total.get(key) or attend[0].get(key) or select.get(key)
        heads = f"{case['q_heads']}/{case['kv_heads']}/{case['index_heads']}"
        numbers = [f"{x:,}" if isinstance(x, int) else x for x in (case["new"], case["prefix"])]
        floor = duration(whole.get("floor_seconds") if whole else None)
        over = " / ".join(_seconds(part.get(key)) for part in attend)
        cells = [heads, *numbers, _seconds(select.get(key)), over, _seconds(total.get(key)), floor]
        cells += [_beside(whole, name) for name in (*PEERS, DENSE)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def captured_sentence(records: Sequence[Record]) -> str:
    """What a graph costs that allows for longer contexts than it meets."""
    record = records[-1]
    times = {"ours": record["seconds"], **record["baselines"]}
    parts = [
        f"{name} {duration(times[name])}, captured for 8k {duration(other)}"
        for name in list(times)
        if (other := times.get(f"{name}, captured for 8k"))
    ]
    return f"**A graph captured for 1 M tokens** on a batch of one and 8k: {'; '.join(parts)}.\n"


def fp8_sentence(records: Sequence[Record]) -> str:
    """What e4m3 caches change."""
    parts = [
        f"{record['case']['data']} data at {record['case']['context']:,} tokens: "
        f"{record['selection_overlap']:.1%} of the chosen blocks are the same, the output differs "
        f"by {record['attention_error']:.1%} over the same blocks and by "
        f"{record['total_error']:.1%} over its own"
        for record in records
    ]
    return f"**e4m3 index and KV caches** beside bf16 ones. {'; '.join(parts)}.\n"


def sections(records: dict[str, list[Record]], folder: Path) -> list[str]:
    """Tables and pictures of what has been recorded; `folder` is that of the pictures."""
    parts = []
    if any(records[bench] for bench in DECODE):
        parts.append(decode_table(records))
        captured = [r for r in records["decode_total"] if "captured_for" in r["case"]]
        parts += [captured_sentence(captured)] if captured else []
    if any(records[bench] for bench in PREFILL):
        parts.append(prefill_table(records))
    if records["fp8_effect"]:
        parts.append(fp8_sentence(records["fp8_effect"]))
    pictures = [
        f"![{text}](bench/results/{name})"
        for name, text in PICTURES.items()
        if (folder / name).exists()
    ]
    return [*parts, *(["\n".join(pictures) + "\n"] if pictures else [])]
