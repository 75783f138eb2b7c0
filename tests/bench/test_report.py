"""The README's speed section comes from the records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from m3trt.bench import report

pytestmark = pytest.mark.smoke


def test_readme_is_current() -> None:
    assert report.main(["--check"]) == 0


def test_newest_record_of_a_case_counts(tmp_path: Path) -> None:
    case = {"batch": 1, "shared_pages": False}
    records = [{"case": case, "seconds": s} for s in (1.0, 2.0)] + [{"case": {"batch": 2}}]
    (tmp_path / "moe.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    loaded = report.load("moe", tmp_path)
    assert [record.get("seconds") for record in loaded] == [2.0, None]


def test_table_says_what_failed_and_what_was_beside() -> None:
    common = {"device": "GPU", "commit": "abc"}
    measured = {
        "case": {"batch": 1024, "dtype": "bfloat16"},
        "seconds": 1.5e-5,
        "floor_seconds": 1.25e-3,
        "rate": 3.456,
        "rate_unit": "TB/s",
        "baselines": {"torch": 2.0},
    }
    failed = {"case": {"batch": 2, "dtype": "bfloat16"}, "error": "out of memory"}
    text = report.table("Title", [measured | common, failed | common])
    assert "**Title** (GPU; bfloat16; commit abc)" in text
    assert "| batch 1,024 | 15 us | 1.25 ms | 3.46 TB/s | torch: 2 s |" in text
    assert "| batch 2 | out of memory | - | - | - |" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (3e-10, "0.0003 us"), (9.996e-4, "1000 us"), (0.5, "500 ms"), (3.678, "3.68 s")],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert report.duration(seconds) == text
