"""Progress of a long copy on stderr: a bar on a terminal, else one line every few seconds."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

SECONDS_BETWEEN_LINES = 10.0


def peak_rss_bytes() -> int:
    """Highest resident memory of this program so far, mapped pages included.

    ru_maxrss would be the same, but for the peak of the process that started us, which it inherits.
    """
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024


def rss_bytes() -> int:
    """Resident memory of this process now."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class Progress:
    """Counts bytes from any thread; `show` is called often and prints when it is time to."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self._lock = threading.Lock()
        self._start = self._last = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="B", unit_scale=True, smoothing=0.05)

    def add(self, count: int) -> None:
        with self._lock:
            self.done += count

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def show(self) -> None:
        """Update the bar, or print a line if the last one is old enough."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"RSS {rss_bytes() / 1e9:.2f} GB", refresh=False)
            self._bar.update(self.done - self._bar.n)
        elif time.monotonic() - self._last >= SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            print(self.line(), file=sys.stderr, flush=True)

    def line(self) -> str:
        """E.g. `3.1 of 8.6 GB, 0.21 GB/s, 26 s left, RSS 0.21 GB`."""
        rate = self.done / max(self.seconds, 1e-9)
        left = f"{(self.total - self.done) / rate:.0f} s left" if rate else "time left unknown"
        return (
            f"{self.done / 1e9:.1f} of {self.total / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s, {left},"
            f" RSS {rss_bytes() / 1e9:.2f} GB"
        )

    def close(self) -> None:
        if self._bar is not None:
            self.show()
            self._bar.close()
