"""Engine metrics under the names that TensorRT-LLM's backend used.

The server crashes when threads change custom metrics at once, so one lock guards them all.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from m3trt.runtime.engine import EngineStats

_GAUGES = {
    ("nv_trt_llm_request_metrics", "request_type"): {
        "waiting": "waiting",
        "context": "context",
        "scheduled": "active",
        "active": "active",
        "max": "max_requests",
    },
    ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type"): {
        "max": "pages_max",
        "free": "pages_free",
        "used": "pages_used",
        "tokens_per": "tokens_per_page",
    },
    ("nv_trt_llm_inflight_batcher_metrics", "inflight_batcher_specific_metric"): {
        "total_context_tokens": "context_tokens",
        "generation_requests": "generation",
    },
    ("nv_trt_llm_general_metrics", "general_type"): {"iteration_counter": "steps"},
    ("nv_trt_llm_token_totals", "token_type"): {
        "input": "total_input_tokens",
        "output": "total_output_tokens",
    },
}
"""(family, label) -> {label value: field of EngineStats}."""


class EngineMetrics:
    """Publishes engine statistics, at most every `period_s` seconds."""

    def __init__(self, pb_utils: Any, model: str, version: str, period_s: float = 0.5) -> None:
        self._lock = threading.Lock()
        self._period_s = period_s
        self._next = 0.0
        self._families = []
        self._gauges: list[tuple[Any, str]] = []
        for (name, label), fields in _GAUGES.items():
            family = pb_utils.MetricFamily(
                name=name,
                description=f"TensorRT engine, by {label}",
                kind=pb_utils.MetricFamily.GAUGE,
            )
            self._families.append(family)
            for value, field in fields.items():
                labels = {"model": model, "version": version, label: value}
                self._gauges.append((family.Metric(labels=labels), field))

    def update(self, stats: EngineStats) -> None:
        with self._lock:
            if time.monotonic() < self._next:
                return
            self._next = time.monotonic() + self._period_s
            for gauge, field in self._gauges:
                gauge.set(getattr(stats, field))

    def close(self) -> None:
        """Give the metrics back while Triton is still there: at the end of the process it is not,
        and their destructors crash."""
        with self._lock:
            self._next = math.inf
            self._gauges.clear()
            self._families.clear()
