"""How many requests a model process has in flight, readable after the process was killed.

Triton 2.51 never answers requests that a killed process held beyond `execute`. The supervisor
reads this count to know whether clients wait for nothing.
"""

from __future__ import annotations

import mmap
import struct
import threading
from pathlib import Path

_COUNT = struct.Struct("<q")


class InflightCount:
    """A number in a small file; kept in memory only when `path` is None."""

    def __init__(self, path: Path | None) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._map: mmap.mmap | None = None
        if path is not None:
            path.write_bytes(_COUNT.pack(0))
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), _COUNT.size)

    def add(self, change: int) -> None:
        with self._lock:
            self._count += change
            if self._map is not None:
                _COUNT.pack_into(self._map, 0, self._count)


def read_count(path: Path) -> int:
    """The last count of the process that wrote `path`; 0 if none was written."""
    try:
        return int(_COUNT.unpack(path.read_bytes())[0])
    except (FileNotFoundError, struct.error):
        return 0
