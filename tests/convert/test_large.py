"""Memory must not grow with the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from m3trt.bench.convert_large import CASES, PEAK_LIMIT_GB, record_case

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(("source", "tp_size"), CASES)
def test_peak_memory(tmp_path: Path, source: str, tp_size: int) -> None:
    record = record_case(source, tp_size, tmp_path / "work")
    assert record["case"]["source_gb"] > (8 if source == "bfloat16" else 6)
    assert record["peak_rss_gb"] < PEAK_LIMIT_GB
