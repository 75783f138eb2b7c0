"""Writes the README's speed section from `bench/results/*.jsonl`.

python -m m3trt.bench.report [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from m3trt.bench import msa_report
from m3trt.bench.records import RESULTS

Record = dict[str, Any]

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- speed: written by m3trt.bench.report -->\n", "<!-- speed: end -->\n"
SECTIONS = {
    "moe": "Mixture of experts, one layer",
    "paged_attention": "Dense paged attention, one layer",
    "cache_update": "Norm, rotation and cache write, one layer",
    "slice": "Whole steps, as recorded with the plain kernels of every op but Gemm",
}
"""Benches with a table, in order; `gemm` has a sentence instead, msa_report the MSA ones."""
MSA = (*msa_report.DECODE, *msa_report.PREFILL, "fp8_effect")


def load(bench: str, results: Path = RESULTS) -> list[Record]:
    """The newest record of every case, in the order in which the cases first appear."""
    newest: dict[str, Record] = {}
    path = results / f"{bench}.jsonl"
    if not path.exists():
        return []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        newest[json.dumps(record["case"], sort_keys=True)] = record
    return list(newest.values())


def duration(seconds: float | None) -> str:
    """E.g. `12.3 us`, `4.56 ms`, `3.68 s`; a dash where nothing was measured."""
    if seconds is None:
        return "-"
    units = ((1, "s"), (1e3, "ms"))
    scale, unit = next((pair for pair in units if seconds * pair[0] >= 1), (1e6, "us"))
    value = seconds * scale
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"


def table(title: str, records: Sequence[Record]) -> str:
    """A Markdown table of one bench; what all its cases share stands in its title."""
    keys = list(dict.fromkeys(key for record in records for key in record["case"]))
    shared = [k for k in keys if len({repr(record["case"].get(k)) for record in records}) == 1]
    common = ", ".join(_named(key, records[0]["case"][key]) for key in shared)
    device = ", ".join(sorted({record["device"] for record in records}))
    commits = ", ".join(sorted({record["commit"] for record in records}))
    lines = [
        f"**{title}** ({device}; {common}; commit {commits})\n",
        "| case | time | floor | rate | beside it |",
        "| --- | --- | --- | --- | --- |",
    ]
    for record in records:
        case = [_named(k, v) for k, v in record["case"].items() if k not in shared]
        time = duration(record.get("seconds")) if "error" not in record else record["error"]
        lines.append(
            f"| {', '.join(case)} | {time} | {duration(record.get('floor_seconds'))}"
            f" | {_rate(record)} | {_baselines(record)} |"
        )
    return "\n".join(lines) + "\n"


def _named(key: str, value: Any) -> str:
    name = key.replace("_", " ")
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {value:,}" if isinstance(value, int) else f"{value}"


def _rate(record: Record) -> str:
    rate = record.get("rate")
    return "-" if rate is None else f"{rate:.3g} {record['rate_unit']}"


def _baselines(record: Record) -> str:
    found = record.get("baselines") or {}
    return "; ".join(f"{name}: {duration(seconds)}" for name, seconds in found.items()) or "-"


def gemm_sentence(records: Sequence[Record]) -> str:
    """How all projections compare with torch."""
    ratios = [record["baselines"]["torch.matmul"] / record["seconds"] for record in records]
    return (
        f"**Gemm**: every projection of M3 at TP 1 and 4 and 1 to 8,192 rows, {len(ratios)} cases"
        f" beside `torch.matmul` in the same run: {min(ratios):.2f}x to {max(ratios):.2f}x its"
        f" speed ({records[0]['device']}; `bench/results/gemm.jsonl`).\n"
    )


def section(results: Path = RESULTS) -> str:
    """All of the text between the README's markers."""
    parts = [table(title, _steps(load(bench, results))) for bench, title in SECTIONS.items()]
    msa = msa_report.sections({bench: load(bench, results) for bench in MSA}, results)
    return "\n".join([gemm_sentence(load("gemm", results)), *msa, *parts])


def _steps(records: list[Record]) -> list[Record]:
    """Without what is no step of the model: building and loading a slice."""
    return [record for record in records if record["case"].get("step") not in ("build", "load")]


def main(argv: Sequence[str] | None = None) -> int:
    """0: the README is (now) current; 1: `--check` found that it is not, or markers are missing."""
    parser = argparse.ArgumentParser(prog="python -m m3trt.bench.report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if not current")
    check = parser.parse_args(argv).check
    text = README.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        print(f"error: {README} lacks the lines {BEGIN!r} and {END!r}", file=sys.stderr)
        return 1
    current = head + BEGIN + section() + END + tail
    if check and current != text:
        print(f"error: {README} is not current: run python -m m3trt.bench.report", file=sys.stderr)
        return 1
    if current != text:
        README.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
