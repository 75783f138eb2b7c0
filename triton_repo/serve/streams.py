"""Keeps streams of other models alive for a while after their end.

Triton 2.51 forgets a stream on a thread of its own, which does not hold Python's lock. Were that
the last reference, it would free NumPy arrays there and corrupt the heap: under load the process
died about once in a thousand requests.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any


class EndedStreams:
    """Drops what it was given `seconds` ago when it is given more; safe from several threads."""

    def __init__(self, seconds: float = 2.0) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._kept: deque[tuple[float, Any]] = deque()

    def keep(self, stream: Any) -> None:
        now = time.monotonic()
        old = []  # freed after the lock
        with self._lock:
            while self._kept and now - self._kept[0][0] > self._seconds:
                old.append(self._kept.popleft())
            self._kept.append((now, stream))

    def close(self) -> None:
        """Drop all, when Triton has had the time to forget the last one."""
        with self._lock:
            if self._kept:
                time.sleep(self._seconds / 4)
            self._kept.clear()
