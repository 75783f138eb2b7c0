"""Maps a safetensors file: every tensor is a read-only view of the file, nothing is copied."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

DTYPES: Mapping[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I8": np.dtype(np.int8),
}
"""The safetensors dtypes that a checkpoint directory may hold."""

_MAX_HEADER_BYTES = 100 << 20


class WeightFileError(ValueError):
    """A safetensors file is truncated or corrupt, or does not hold what the engine needs."""


def map_weights(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Map `path` and return its tensors by name, in file order.

    The views keep the mapping alive; pages are read when they are first touched.

    Raises:
        WeightFileError: the file is missing, truncated or corrupt; names the file and the tensor.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 8:
                raise WeightFileError(f"{path}: {size} bytes, too short for a safetensors header")
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise WeightFileError(
            f"{path} does not exist: run m3trt.convert, or repair the link to its checkpoint"
        ) from None
    header_size = int.from_bytes(buffer[:8], "little")
    if header_size > min(_MAX_HEADER_BYTES, size - 8):
        raise WeightFileError(
            f"{path}: header of {header_size} bytes in a file of {size}: truncated or corrupt"
        )
    try:
        header = json.loads(buffer[8 : 8 + header_size])
    except ValueError as error:
        raise WeightFileError(f"{path}: the header is not JSON ({error})") from error
    header.pop("__metadata__", None)
    start = 8 + header_size
    entries = sorted(header.items(), key=lambda item: int(item[1]["data_offsets"][0]))
    return {name: _view(path, buffer, start, size, name, entry) for name, entry in entries}


def _view(
    path: Path, buffer: mmap.mmap, start: int, size: int, name: str, entry: dict[str, Any]
) -> npt.NDArray[Any]:
    if entry["dtype"] not in DTYPES:
        raise WeightFileError(
            f"{path}:{name}: dtype {entry['dtype']}, expected one of {', '.join(DTYPES)}"
        )
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    count = math.prod(shape)
    if end - begin != count * dtype.itemsize:
        raise WeightFileError(
            f"{path}:{name}: {end - begin} bytes of data, shape {list(shape)} of"
            f" {entry['dtype']} needs {count * dtype.itemsize}"
        )
    if start + end > size:
        raise WeightFileError(
            f"{path}:{name}: data ends at byte {start + end}, the file has {size}: truncated"
        )
    return np.frombuffer(buffer, dtype, count, start + begin).reshape(shape)


def match_weights(
    path: Path,
    found: Mapping[str, npt.NDArray[Any]],
    expected: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
) -> None:
    """Check that a file holds exactly the expected tensors (name -> dtype, shape).

    Raises:
        WeightFileError: lists every tensor that is missing, unexpected or differs.
    """
    problems = [f"missing {name}" for name in expected.keys() - found.keys()]
    problems += [f"unexpected {name}" for name in found.keys() - expected.keys()]
    for name in expected.keys() & found.keys():
        dtype, shape = expected[name]
        array = found[name]
        if array.dtype != dtype or array.shape != shape:
            problems.append(
                f"{name} is {array.dtype} {list(array.shape)}, expected {dtype} {list(shape)}"
            )
    if problems:
        raise WeightFileError(
            f"{path} does not fit the engine: {'; '.join(sorted(problems))}."
            " Build the engine from this checkpoint again"
        )
