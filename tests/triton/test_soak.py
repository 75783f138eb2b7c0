"""Minutes of mixed traffic: nothing grows, nothing is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from m3trt.bench.records import append_record
from m3trt.bench.soak import soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MODELS_PYTHON = Path(__file__).resolve().parents[2] / ".venv" / "models" / "bin" / "python"
KINDS = {"text", "stream", "picture", "hang_up", "wrong"}


def test_mixed_traffic(engine_dir: Path) -> None:
    record: dict[str, Any] = soak(engine_dir, 15, MODELS_PYTHON)
    append_record("load_test", record, {})
    assert record["problems"] == []
    assert record["requests"].keys() == KINDS
