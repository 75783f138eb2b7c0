"""Device memory as plain bytes: what TensorRT needs of a tensor is its address and its shape."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

UPLOAD_CHUNK = 64 << 20
"""Bytes of each of the two pinned buffers through which weights pass."""

COPY_THREADS = 8
"""Threads that fill one: a single one is slower than a disk, and asks it for one page at a time."""

REPORT_SECONDS = 10.0


def import_torch() -> Any:
    """torch, imported on first use: these modules must load on machines without it."""
    return importlib.import_module("torch")


def as_bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The bytes of an array of any dtype; a view where the array is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def chunks(size: int, chunk: int) -> Iterator[slice]:
    """0..size in pieces of at most `chunk`."""
    for begin in range(0, size, chunk):
        yield slice(begin, min(begin + chunk, size))


class StagedBuffer:
    """A device buffer that grows on demand, filled and read through pinned host memory."""

    def __init__(self) -> None:
        self._device: Any = None
        self._host: Any = None

    def reserve(self, size: int) -> int:
        """Make room for `size` bytes and return the device address, never null."""
        if self._device is None or self._device.numel() < size:
            self._device = _device_bytes(size)
        return int(self._device.data_ptr())

    def write(self, array: npt.NDArray[Any]) -> int:
        """Copy an array to the device on the current stream; returns its address.

        The next write must wait until this copy has ended.
        """
        source = as_bytes(array)
        address = self.reserve(source.size)
        if self._host is None or self._host.numel() < source.size:
            self._host = _pinned(source.size)
        self._host.numpy()[: source.size] = source
        self._device[: source.size].copy_(self._host[: source.size], non_blocking=True)
        return address

    def read(self, size: int) -> npt.NDArray[np.uint8]:
        """Copy the first `size` bytes to the host and wait for the current stream.

        torch keeps pinned memory that is no longer referred to, so after the first steps the
        array, which the caller owns, costs neither an allocation nor a second copy.
        """
        host = _pinned(size)
        host[:size].copy_(self._device[:size], non_blocking=True)
        import_torch().cuda.current_stream().synchronize()
        array: npt.NDArray[np.uint8] = host.numpy()[:size]
        return array


def _pinned(size: int) -> Any:
    torch = import_torch()
    return torch.empty(max(size, 1), dtype=torch.uint8, pin_memory=True)


def _device_bytes(size: int) -> Any:
    torch = import_torch()
    return torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")


class Uploader:
    """Streams mapped arrays to the device through two pinned buffers, reporting progress."""

    def __init__(self, total_bytes: int) -> None:
        torch = import_torch()
        self._buffers = [_pinned(UPLOAD_CHUNK) for _ in range(2)]
        self._threads = ThreadPoolExecutor(COPY_THREADS, "m3-upload")
        self._free = [torch.cuda.Event() for _ in range(2)]
        self._next = 0
        self._total, self._done = total_bytes, 0
        self._start = self._reported = time.monotonic()

    def upload(self, array: npt.NDArray[Any]) -> Any:
        """A torch uint8 tensor on the device that holds the array's bytes."""
        source = as_bytes(array)
        target = _device_bytes(source.size)
        for piece in chunks(source.size, UPLOAD_CHUNK):
            host, free = self._buffers[self._next], self._free[self._next]
            free.synchronize()
            length = piece.stop - piece.start
            self._copy(host.numpy()[:length], source[piece])
            target[piece].copy_(host[:length], non_blocking=True)
            free.record()
            self._next = 1 - self._next
            self._report(length)
        return target

    def finish(self) -> None:
        """Wait for the last copies."""
        for free in self._free:
            free.synchronize()
        self._threads.shutdown()

    def _copy(self, target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
        parts = chunks(source.size, -(-source.size // COPY_THREADS))
        wait([self._threads.submit(np.copyto, target[part], source[part]) for part in parts])

    def _report(self, length: int) -> None:
        self._done += length
        now = time.monotonic()
        if now - self._reported >= REPORT_SECONDS or self._done == self._total:
            self._reported = now
            logger.info(
                "weights: %.1f of %.1f GB on the GPU, %.1f GB/s",
                self._done / 1e9,
                self._total / 1e9,
                self._done / 1e9 / max(now - self._start, 1e-9),
            )
