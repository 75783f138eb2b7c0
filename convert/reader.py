"""Reads safetensors lazily: headers first, all of them checked, then ranges of values by pread.

pread and not mmap: mapped pages would count as this process's memory, however briefly needed.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from m3trt.convert.dtypes import NUMPY_DTYPES, item_bytes
from m3trt.convert.errors import ConvertError, listed

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""


class StoredTensor(NamedTuple):
    """Where a tensor's values lie: `offset` counts from the start of `path`."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * item_bytes(self.dtype)

    def __str__(self) -> str:
        return f"{self.path.name}: {self.name} is {self.dtype} {list(self.shape)}"


def read_checkpoint(model_dir: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint directory: of the shards of its index, or of its single file.

    Raises:
        ConvertError: a file is missing, truncated or corrupt, or the index disagrees with it.
    """
    index = model_dir / INDEX_FILE
    if not index.is_file():
        if not (model_dir / SINGLE_FILE).is_file():
            found = sorted(path.name for path in model_dir.glob("*.safetensors"))
            raise ConvertError(
                f"{model_dir} holds neither {INDEX_FILE} nor {SINGLE_FILE};"
                f" found: {listed(found) or 'no safetensors file'}"
            )
        return read_header(model_dir / SINGLE_FILE)
    weight_map = _read_index(index)
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        for name, tensor in read_header(model_dir / shard).items():
            if weight_map.get(name) != shard:
                where = weight_map.get(name, "in no file")
                raise ConvertError(f"{model_dir / shard}: holds {name}, but {index} says {where}")
            tensors[name] = tensor
    absent = sorted(weight_map.keys() - tensors.keys())
    if absent:
        pairs = [f"{name} in {weight_map[name]}" for name in absent]
        raise ConvertError(f"{index} names tensors that the files lack: {listed(pairs)}")
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConvertError(f"{path}: expected JSON with a weight_map, found {error!r}") from error
    if not isinstance(weight_map, dict):
        raise ConvertError(f"{path}: weight_map is {weight_map!r:.80}, expected an object")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ConvertError(f"{path}: {name} is in {shard!r}, expected a plain file name")
        if not (path.parent / shard).is_file():
            raise ConvertError(f"{path.parent / shard} does not exist, but {path.name} names it")
    return weight_map


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file; together they have to cover its data exactly.

    Raises:
        ConvertError: anything about the header is wrong, or the file is shorter than it says.
    """
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ConvertError(f"{path}: {file_bytes} bytes, expected at least 8: truncated")
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES or 8 + length > file_bytes:
            raise ConvertError(
                f"{path}: says its header has {length} bytes, but the file has {file_bytes}"
                f" (and the format allows {MAX_HEADER_BYTES}): truncated or not safetensors"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_unique_keys)
        if not isinstance(header, dict):
            raise ValueError(f"a {type(header).__name__} instead of an object")
    except (ValueError, RecursionError) as error:
        raise ConvertError(f"{path}: corrupt header: {error}") from error
    header.pop("__metadata__", None)
    return _locate(path, header, 8 + length, file_bytes)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} occurs twice")
        found[key] = value
    return found


def _locate(
    path: Path, header: dict[str, Any], data_start: int, file_bytes: int
) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        dtype, shape, begin, end = _entry(path, name, entry)
        tensor = StoredTensor(name, path, dtype, shape, data_start + begin)
        if end - begin != tensor.num_bytes:
            raise ConvertError(
                f"{path}: {name} is {dtype} {list(shape)} in {end - begin} bytes,"
                f" expected {tensor.num_bytes}"
            )
        tensors[name] = tensor
        ranges.append((begin, end, name))
    expected = 0
    for begin, end, name in sorted(ranges):
        if begin != expected:
            what = "overlaps the tensor before it" if begin < expected else "follows a hole"
            raise ConvertError(
                f"{path}: {name} starts at byte {begin} of the data and {what}, expected {expected}"
            )
        expected = end
    if data_start + expected != file_bytes:
        state = "truncated" if file_bytes < data_start + expected else "too long"
        raise ConvertError(
            f"{path}: the file has {file_bytes} bytes, expected {data_start + expected}"
            f" as its header says: {state}"
        )
    return tensors


def _entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sizes = [begin, end, *shape]
    except (KeyError, TypeError, ValueError):
        raise ConvertError(
            f"{path}: corrupt header: {name} is {entry!r}, expected dtype, shape, data_offsets"
        ) from None
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ConvertError(f"{path}: corrupt header: {name} has sizes {sizes}, expected integers")
    if not isinstance(dtype, str) or dtype not in NUMPY_DTYPES:
        raise ConvertError(
            f"{path}: {name} has dtype {dtype!r}, expected one of {', '.join(NUMPY_DTYPES)}"
        )
    return dtype, tuple(shape), begin, end


class FileReader:
    """Reads ranges of stored tensors from any thread; keeps the files open until `close`."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read(self, tensor: StoredTensor, first: int, count: int) -> npt.NDArray[np.generic]:
        """Elements first..first+count of the flattened tensor, in its own dtype.

        Raises:
            ConvertError: the file ends early or cannot be read.
        """
        dtype = np.dtype(NUMPY_DTYPES[tensor.dtype])
        values = np.empty(count, dtype)
        view = memoryview(values.view(np.uint8))  # type: ignore[arg-type]
        offset = tensor.offset + first * dtype.itemsize
        while view:
            try:
                got = os.preadv(self._open(tensor.path), [view], offset)
            except OSError as error:
                raise ConvertError(
                    f"{tensor.path}: reading {tensor.name}: {error.strerror}"
                ) from error
            if got == 0:
                raise ConvertError(
                    f"{tensor.path}: {tensor.name} ends at byte {offset}: the file became shorter"
                    " while it was read"
                )
            view, offset = view[got:], offset + got
        return values

    def forget(self, tensor: StoredTensor) -> None:
        """Tell the kernel that the tensor will not be read again: its cached pages may go."""
        advise = os.POSIX_FADV_DONTNEED
        os.posix_fadvise(self._open(tensor.path), tensor.offset, tensor.num_bytes, advise)

    def _open(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._files[path]

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
