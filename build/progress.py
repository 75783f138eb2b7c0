"""Shows how far TensorRT's builder is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 5.0


class ProgressReport:
    """Shows the builder's phases and steps on stderr; safe from several threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._start = self._last_line = time.monotonic()
        self._lock = threading.Lock()
        self._outermost: set[str] = set()
        self._totals: dict[str, int] = {}
        self._bar: Any = None
        if sys.stderr.isatty():
            self._bar = tqdm(desc=name, unit="step", miniters=0)

    def __enter__(self) -> ProgressReport:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
        with self._lock:
            self._totals[phase] = steps
            if parent is None:
                self._outermost.add(phase)
                if self._bar is not None:
                    self._bar.reset(total=steps)

    def step_complete(self, phase: str, step: int) -> None:
        """Step `step` (from 0) of `phase` is done."""
        with self._lock:
            now = time.monotonic()
            if self._bar is not None:
                self._bar.set_postfix_str(phase, refresh=False)
                self._bar.update(step + 1 - self._bar.n if phase in self._outermost else 0)
            elif now - self._last_line >= SECONDS_BETWEEN_LINES:
                self._last_line = now
                total = self._totals.get(phase, 0)
                print(
                    f"{self._name}: {phase}, step {step + 1} of {total}, {now - self._start:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )


def progress_monitor(trt: Any, report: ProgressReport) -> Any:
    """The library's `IProgressMonitor` that feeds `report`; never asks for cancellation."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            report.phase_start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            report.step_complete(phase_name, step)
            return True

        def phase_finish(self, phase_name: str) -> None:
            pass

    return Monitor()
