"""Appends result records to `bench/results/*.jsonl`: one JSON object a line."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def cpu_name() -> str:
    """E.g. `AMD EPYC, 2 cores`."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":", 1)[1] for line in lines if line.startswith("model name")), "CPU")
    return f"{name.strip()}, {os.cpu_count()} cores"


def commit() -> str:
    """The commit that is measured, with `-dirty` if files other than the records differ from it;
    `M3_COMMIT` names that of a copy without git."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["git", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=RESULTS, check=False)

    found = git("rev-parse", "--short=12", "HEAD").stdout.strip()
    if not found:
        return os.environ.get("M3_COMMIT", "unknown")
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
