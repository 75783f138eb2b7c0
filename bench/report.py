"""Writes the README's speed section and `bench/results/README.md` from `bench/results/*.jsonl`.

python -m m3trt.bench.report [--check]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from m3trt.bench import msa_report, step_report, summary
from m3trt.bench.records import RESULTS, Record, duration, load, load_all, wrapped

README = Path(__file__).resolve().parent.parent / "README.md"
FULL = RESULTS / "README.md"
BEGIN, END = "<!-- speed: written by m3trt.bench.report -->\n", "<!-- speed: end -->\n"
SECTIONS = {
    "gemm": "Gemm, every projection",
    "moe": "Mixture of experts, one layer",
    "paged_attention": "Dense paged attention, one layer",
    "dense": f"Dense paged attention beside {msa_report.DENSE}, one layer",
    "cache_update": "Norm, rotation and cache write, one layer",
    "norm": "Residual addition with norm, and embedding",
    "slice": "Whole steps",
    "collectives": "Collectives of a captured step on two GPUs",
    "load": "Weights of a rank from a safetensors file onto the GPU",
}
"""Benches with plain tables, in order, and `dense` (summary.dense); msa_report has those of MSA."""
NOTES = {
    "moe": "vLLM's figure leaves out its router, alignment, activation and sum, which are in our"
    " time. What compares with it is `its GEMMs alone`: our experts' products, with SwiGLU. Short"
    " steps, one kernel behind the router's logits, and earlier records have no such figure.",
    "dense": "As `decode` and `prefill` timed both beside MSA.",
    "slice": "The slice is one dense and five sparse layers, the rank all 60 without all-reduces."
    " Between the plain MSA kernels and those of now, norms, embedding and the experts of short"
    " decode steps changed as well.",
    "collectives": "Sums of hidden states over o_proj or the experts (6,144 wide), gathered logits;"
    " NCCL, NVLink. Floors: the link's 450 GB/s in each direction.",
    "load": "Host memory is what the load needs beyond the page cache; the second load finds the"
    " pinned buffers of the first. Floor: a copy from pinned memory of as many bytes.",
}
HEAD = """# Results

Written by `python -m m3trt.bench.report` from the records beside this file; do not edit. What each
figure means and how it was measured: [../README.md](../README.md).

* In brackets: their time over ours; below 1x they are faster.
* Heads are query, KV and index heads: 64/4/4 the whole model (TP 1), 16/1/1 a TP 4 rank, 8/1/1 a
  TP 8 rank. "Asked" is what was set as the target before the kernel was written.
* Not in these tables: `build` and `convert` (the main README has them), `load_test` (soaks).
* Floors are the least time at 4.69 TB/s and 703 TFLOP/s. Some cases are below theirs: bursts of
  products run faster than 703 TFLOP/s, clustered selections share blocks that the floor counts once
  a row, and steps whose tokens agree read fewer experts (said where it is so).
"""


SIZES = {"host memory": "host_bytes", "largest tensor": "largest_tensor_bytes"}
"""Fields of a record that are numbers of bytes, by their columns."""


def table(title: str, records: Sequence[Record]) -> str:
    """A Markdown table of one bench; what all its cases share stands above it."""
    keys = list(dict.fromkeys(key for record in records for key in record["case"]))
    shared = [k for k in keys if len({repr(record["case"].get(k)) for record in records}) == 1]
    common = ", ".join(_named(key, records[0]["case"][key]) for key in shared)
    device = ", ".join(sorted({record["device"] for record in records}))
    commits = sorted({record["commit"] for record in records})
    rows = []
    for record in records:
        case = [_named(k, v) for k, v in record["case"].items() if k not in shared]
        time = duration(record.get("seconds")) if "error" not in record else record["error"]
        cells = [", ".join(case), time, duration(record.get("floor_seconds")), _rate(record)]
        cells += [f"{record[of] / 1e9:.3g} GB" if of in record else "-" for of in SIZES.values()]
        cells += [_baselines(record), record["commit"] if len(commits) > 1 else "-"]
        rows.append(cells)
    above = "; ".join([device, *([common] if common else [])])
    above += f"; commit {commits[0]}" if len(commits) == 1 else ""
    titles = ("case", "time", "floor", "rate", *SIZES, "beside it", "commit")
    return f"### {title}\n\n{above}\n\n{msa_report.markdown(titles, rows)}"


def _named(key: str, value: Any) -> str:
    name = key.replace("_", " ")
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {value:,}" if isinstance(value, int) else f"{value}"


def _rate(record: Record) -> str:
    rate = record.get("rate")
    if rate is None:
        return "-"
    if "rate_unit" in record:
        return f"{rate:.3g} {record['rate_unit']}"
    return f"{rate / 1e12:.3g} {'TB/s' if record['bound'] == 'bytes' else 'TFLOP/s'}"


def _baselines(record: Record) -> str:
    """All that ran beside the case, at last what did so only in earlier runs."""
    now, before = record.get("baselines") or {}, record.get("earlier_baselines", {})
    gemms = record.get("gemms_seconds")
    found = [f"its GEMMs alone: {duration(gemms)}"] if gemms else []
    found += [f"{name}: {duration(seconds)}" for name, seconds in now.items()]
    found += [f"{name}, earlier run: {duration(seconds)}" for name, seconds in before.items()]
    return "; ".join(found) or "-"


def order(record: Record) -> tuple[Any, ...]:
    """By what runs, then from short to long."""
    case = record["case"]
    names = ("tp_size", "context", "prefix", "batch", "new", "m", "rows")
    kind = (case.get("model") == "rank", "bench" in case, "prefix" in case, case.get("step", ""))
    heads = (-case.get("q_heads", 0), -case.get("index_heads", 0))
    what = str(case.get("op", case.get("projection", "")))
    small = (what, str(case.get("dtype", "")), case.get("q_len", 1))
    return (kind, heads, small, tuple(case.get(name, 0) for name in names), repr(case))


def read_back(results: Path = RESULTS) -> str:
    """Which records are not what a bench wrote, and why."""
    names = {path.stem for path in results.glob("*.jsonl")}
    found = [n for n in sorted(names) if any("source" in r for r in load(n, results))]
    if not found:
        return ""
    text = (
        "Records with `source` were read back from what a run printed, because it was cut off at"
        " its time limit or wrote no records, so their values are rounded: some or all of"
        f" {', '.join(found)}."
    )
    return wrapped("* " + text, "  ")


def full(results: Path = RESULTS) -> str:
    """All of `results/README.md`."""
    benches = (*msa_report.TITLES, "fp8_effect")
    msa = msa_report.sections({bench: load(bench, results) for bench in benches}, results)
    parts = [HEAD + read_back(results), *msa]
    slices = summary.eras(load_all("slice", results))
    for bench, title in SECTIONS.items():
        newest = summary.dense(results) if bench == "dense" else load(bench, results)
        records = sorted(summary.steps(newest), key=order)
        if records:
            note = NOTES.get(bench, "")
            if bench == "slice":
                sentences = (note, summary.rank_sentence(slices), summary.routing_sentence(newest))
                note = " ".join(filter(None, sentences))
            parts.append(table(title, records) + (f"\n{wrapped(note)}" if note else ""))
        if bench == "slice":
            parts += filter(None, (step_report.breakdowns(records), step_report.engines(newest)))
    if before := [record for record in slices.plain if record["case"]["model"] == "slice"]:
        title = "Whole steps of the slice with the plain MSA kernels"
        parts.append(table(title, sorted(before, key=order)))
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """0: both files are (now) current; 1: `--check` found one that is not, or no markers."""
    parser = argparse.ArgumentParser(prog="python -m m3trt.bench.report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if not current")
    check = parser.parse_args(argv).check
    text = README.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        print(f"error: {README} lacks the lines {BEGIN!r} and {END!r}", file=sys.stderr)
        return 1
    current = {README: head + BEGIN + summary.section() + END + tail, FULL: full()}
    for path, wanted in current.items():
        if path.exists() and path.read_text(encoding="utf-8") == wanted:
            continue
        if check:
            print(
                f"error: {path} is not current: run python -m m3trt.bench.report", file=sys.stderr
            )
            return 1
        path.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
