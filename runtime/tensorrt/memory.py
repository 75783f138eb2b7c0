"""Device memory as plain bytes: what TensorRT needs of a tensor is its address and its shape."""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event, Lock
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from m3trt.convert.reader import StoredTensor

Piece = tuple[Any, int]
"""Part of a device tensor, and where its bytes lie in a file."""

logger = logging.getLogger(__name__)

READERS, PIECE = 12, 8 << 20
"""Threads that read weights, and bytes of the pinned buffer of each. From the page cache they reach
32 to 37 GB/s, one thread 5; pinned copies reach 55. Pinning the mapped file itself reaches 20."""

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
            self._host = pinned(source.size)
        self._host.numpy()[: source.size] = source
        self._device[: source.size].copy_(self._host[: source.size], non_blocking=True)
        return address

    def read(self, size: int) -> npt.NDArray[np.uint8]:
        """Copy the first `size` bytes to the host and wait for the current stream.

        torch keeps pinned memory that is no longer referred to, so after the first steps the
        array, which the caller owns, costs neither an allocation nor a second copy.
        """
        host = pinned(size)
        host[:size].copy_(self._device[:size], non_blocking=True)
        import_torch().cuda.current_stream().synchronize()
        array: npt.NDArray[np.uint8] = host.numpy()[:size]
        return array


def pinned(size: int) -> Any:
    """Pinned host memory, a torch uint8 tensor."""
    torch = import_torch()
    return torch.empty(max(size, 1), dtype=torch.uint8, pin_memory=True)


def _device_bytes(size: int) -> Any:
    torch = import_torch()
    return torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")


def upload(path: Path, tensors: Sequence[StoredTensor]) -> list[Any]:
    """The bytes of some of a file's tensors as torch uint8 tensors on the current stream's device.

    Threads take the pieces in turn; each reads into a pinned buffer of its own and copies from it.

    Raises:
        OSError: the file cannot be read, or has become shorter.
    """
    stream = import_torch().cuda.current_stream()
    targets = [_device_bytes(tensor.num_bytes) for tensor in tensors]
    pieces = [
        (target[part], tensor.offset + part.start)
        for target, tensor in zip(targets, tensors, strict=True)
        for part in chunks(tensor.num_bytes, PIECE)
    ]
    progress, ended = Progress(sum(tensor.num_bytes for tensor in tensors)), Event()
    with path.open("rb") as file, ThreadPoolExecutor(READERS, "m3-upload") as readers:
        turns = [
            readers.submit(_upload, file, pieces[reader::READERS], stream, progress, ended)
            for reader in range(READERS)
        ]
        try:
            wait(turns, return_when=FIRST_EXCEPTION)
        finally:
            ended.set()  # the readers beside one that failed end with their piece
        for turn in turns:
            turn.result()
    return targets


def _upload(
    file: BinaryIO, pieces: Sequence[Piece], stream: Any, progress: Progress, ended: Event
) -> None:
    torch = import_torch()
    buffer = pinned(max((target.numel() for target, _ in pieces), default=0))
    with torch.cuda.stream(stream):  # which also makes its device this thread's
        sent = torch.cuda.Event()
        for target, offset in pieces:
            if ended.is_set():
                return
            host = buffer[: target.numel()]
            _read(file, memoryview(host.numpy()), offset)
            target.copy_(host, non_blocking=True)
            sent.record()
            sent.synchronize()
            progress.add(target.numel())


def _read(file: BinaryIO, target: memoryview, offset: int) -> None:
    """Fill `target` from `offset` on; one call reads at most 2 GB, or less when interrupted."""
    done = 0
    while done < len(target):
        length = os.preadv(file.fileno(), [target[done:]], offset + done)
        if length == 0:
            raise OSError(f"{file.name} ends at {offset + done} bytes while its weights are read")
        done += length


class Progress:
    """Logs every few seconds, and at the end, how many bytes several threads have done."""

    def __init__(self, total: int) -> None:
        self._lock = Lock()
        self._total, self._done = total, 0
        self._start = self._reported = time.monotonic()

    def add(self, length: int) -> None:
        with self._lock:
            self._done += length
            now = time.monotonic()
            if now - self._reported < REPORT_SECONDS and self._done < self._total:
                return
            self._reported = now
            logger.info(
                "weights: %.1f of %.1f GB on the GPU, %.1f GB/s",
                self._done / 1e9,
                self._total / 1e9,
                self._done / 1e9 / max(now - self._start, 1e-9),
            )
