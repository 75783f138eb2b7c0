"""Appends result records to `bench/results/*.jsonl`, one JSON object a line, and reads them."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import textwrap
from pathlib import Path
from typing import Any

Record = dict[str, Any]

RESULTS = Path(__file__).parent / "results"


def cpu_name() -> str:
    """E.g. `AMD EPYC, 2 cores`."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":", 1)[1] for line in lines if line.startswith("model name")), "CPU")
    return f"{name.strip()}, {os.cpu_count()} cores"


def commit() -> str:
    """The commit that is measured: `M3_COMMIT` where it is set, for copies without git, else git's,
    with `-dirty` if files other than the records differ from it."""
    if named := os.environ.get("M3_COMMIT"):
        return named

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["git", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=RESULTS, check=False)

    found = git("rev-parse", "--short=12", "HEAD").stdout.strip()
    if not found:
        return "unknown"
    changed = git("diff", "--quiet", "HEAD", "--", ":/", ":(top,exclude)bench/results").returncode
    return f"{found}-dirty" if changed else found


def gpu() -> dict[str, str]:
    """Name and driver of the GPU, as `device` and `driver` of a record."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    name, driver = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(
        ","
    )
    return {"device": name.strip(), "driver": driver.strip()}


def append_record(bench: str, record: dict[str, Any], versions: dict[str, str]) -> None:
    """Add `record` to `results/{bench}.jsonl` with where, when and of what it was taken.

    Args:
        record: at least `case` and either `error` or the measurement; may override `device`.
    """
    common = {
        "bench": bench,
        "device": cpu_name(),
        "driver": None,
        "versions": {"python": platform.python_version(), **versions},
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    with (RESULTS / f"{bench}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(common | record) + "\n")


def load_all(bench: str, results: Path = RESULTS) -> list[Record]:
    """Every record, oldest first."""
    path = results / f"{bench}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def load(bench: str, results: Path = RESULTS) -> list[Record]:
    """The newest record of every case, in the order in which the cases first appear.

    What ran beside older records of a case and not beside the newest is its `earlier_baselines`.
    """
    newest: dict[str, Record] = {}
    for record in load_all(bench, results):
        key = json.dumps(record["case"], sort_keys=True)
        beside = record.get("baselines") or {}
        before = newest.get(key, {})
        known = before.get("earlier_baselines", {}) | (before.get("baselines") or {})
        earlier = {name: seconds for name, seconds in known.items() if name not in beside}
        newest[key] = record | ({"earlier_baselines": earlier} if earlier else {})
    return list(newest.values())


def duration(seconds: float | None) -> str:
    """E.g. `12.3 us`, `4.56 ms`, `3.68 s`; a dash where nothing was measured."""
    if seconds is None:
        return "-"
    units = ((1, "s"), (1e3, "ms"))
    scale, unit = next((pair for pair in units if seconds * pair[0] >= 1), (1e6, "us"))
    value = seconds * scale
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"


def tokens(count: int) -> str:
    """E.g. `338`, `60k`, `1M`."""
    if count >= 1 << 20:
        return f"{count >> 20}M"
    return f"{count / 1024:.0f}k" if count >= 4096 else f"{count:,}"


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph of at most 100 columns."""
    return (
        textwrap.fill(
            text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        + "\n"
    )
