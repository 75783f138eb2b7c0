"""Engine metrics: published under their names, and gone before the process ends."""

from __future__ import annotations

import dataclasses
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from m3trt.runtime.engine import EngineStats
from m3trt.serve.metrics import EngineMetrics

pytestmark = pytest.mark.smoke

STATS = EngineStats(*range(len(dataclasses.fields(EngineStats))))


class Gauge:
    def __init__(self, labels: dict[str, str]) -> None:
        self.labels = labels
        self.values: list[float] = []

    def set(self, value: float) -> None:
        self.values.append(value)


class Family:
    GAUGE = "gauge"
    made: weakref.WeakSet[Gauge]

    def __init__(self, name: str, description: str, kind: str) -> None:
        assert name.startswith("nv_trt_llm_")
        assert kind == self.GAUGE

    def Metric(self, labels: dict[str, str]) -> Gauge:
        gauge = Gauge(labels)
        self.made.add(gauge)
        return gauge


@pytest.fixture
def pb_utils() -> Any:
    Family.made = weakref.WeakSet()
    return SimpleNamespace(MetricFamily=Family)


def test_every_gauge_is_set_at_most_once_a_period(pb_utils: Any) -> None:
    metrics = EngineMetrics(pb_utils, "tensorrt_llm", "1", period_s=60)
    metrics.update(STATS)
    metrics.update(STATS)
    values = {next(reversed(gauge.labels.values())): gauge.values for gauge in Family.made}
    assert values["waiting"] == [STATS.waiting]
    assert values["used"] == [STATS.pages_used]
    assert all(len(found) == 1 for found in values.values())


def test_close_drops_the_metrics_whoever_still_calls(pb_utils: Any) -> None:
    """Their destructors need Triton, which is gone when the process ends."""
    metrics = EngineMetrics(pb_utils, "tensorrt_llm", "1", period_s=0)
    update = metrics.update
    metrics.close()
    assert not Family.made
    update(STATS)
