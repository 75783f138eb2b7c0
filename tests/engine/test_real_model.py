"""The released 60-layer model builds from its config alone, in time and memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from m3trt.bench.build_real import PEAK_LIMIT_GB, SECONDS_LIMIT, record_case

pytestmark = pytest.mark.slow

REAL = Path(__file__).parents[1] / "data" / "minimax_m3_config.json"


@pytest.mark.parametrize("tp_size", [1, 8])
def test_time_and_memory(tp_size):
    record = record_case(REAL, tp_size)
    assert record["case"]["layers"] == 60
    assert record["seconds"] < SECONDS_LIMIT
    assert record["peak_rss_gb"] < PEAK_LIMIT_GB
