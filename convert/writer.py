"""Writes one safetensors file whose tensors arrive in pieces, in any order, from any thread."""

from __future__ import annotations

import json
import os
import struct
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
from m3trt.convert.dtypes import item_bytes
from m3trt.convert.errors import ConvertError
from m3trt.convert.layout import TensorSpec


def encode_header(tensors: dict[str, TensorSpec]) -> tuple[bytes, dict[str, int]]:
    """The bytes before the data, and where in the file each tensor starts.

    The widest dtype comes first, so every tensor is aligned to its element size.
    """
    offsets: dict[str, int] = {}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in sorted(tensors.items(), key=lambda item: -item_bytes(item[1].dtype)):
        offsets[name], end = end, end + spec.num_bytes
        header[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data_start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {n: data_start + o for n, o in offsets.items()}


class TensorFile:
    """A safetensors file of known layout that is filled piece by piece."""

    def __init__(self, path: Path, tensors: dict[str, TensorSpec]) -> None:
        self.path = path
        header, self._offsets = encode_header(tensors)
        self._lock = threading.Lock()
        self._missing = sum(spec.num_bytes for spec in tensors.values())
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        self._write("the header", memoryview(header), 0)

    def write(self, name: str, first: int, values: npt.NDArray[np.generic]) -> None:
        """Store contiguous `values`, which have the tensor's dtype, from element `first` on.

        Raises:
            ConvertError: the disk is full, or any other failure to write.
        """
        data = memoryview(values.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        self._write(name, data, self._offsets[name] + first * values.itemsize)
        with self._lock:
            self._missing -= len(data)

    def _write(self, name: str, data: memoryview, offset: int) -> None:
        while data:
            try:
                count = os.pwrite(self._descriptor, data, offset)
            except OSError as error:
                raise self._failed(f"writing {name}", error) from error
            data, offset = data[count:], offset + count

    def _failed(self, doing: str, error: OSError) -> ConvertError:
        return ConvertError(
            f"{self.path}: {doing}: {error.strerror}; {self._missing / 1e9:.2f} GB of this file"
            " were still to come: make room or choose another --output_dir"
        )

    def finish(self) -> None:
        """Wait until everything is on the disk.

        Raises:
            ConvertError: pieces are missing, or the disk fails late.
        """
        if self._missing:
            raise ConvertError(f"{self.path}: {self._missing} bytes were never written")
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._failed("flushing", error) from error

    def close(self) -> None:
        os.close(self._descriptor)
