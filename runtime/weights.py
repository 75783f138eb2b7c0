"""Finds, checks and maps the tensors of a safetensors file; nothing is copied."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from m3trt.convert.dtypes import NUMPY_DTYPES
from m3trt.convert.errors import ConvertError
from m3trt.convert.reader import StoredTensor, read_header


class WeightFileError(ValueError):
    """A weight file is missing or damaged, or does not hold what the engine needs."""


def find_weights(path: Path) -> dict[str, StoredTensor]:
    """Where the tensors of `path` lie, by name, in file order.

    Raises:
        WeightFileError: the file is missing, truncated or corrupt; names the file and the tensor.
    """
    try:
        stored = read_header(path)
    except FileNotFoundError:
        raise WeightFileError(
            f"{path} does not exist: run m3trt.convert, or repair the link to its checkpoint"
        ) from None
    except ConvertError as error:
        raise WeightFileError(str(error)) from error
    return {x.name: x for x in sorted(stored.values(), key=lambda tensor: tensor.offset)}


def map_weights(path: Path, stored: Mapping[str, StoredTensor]) -> dict[str, npt.NDArray[Any]]:
    """Map `path` and return the tensors that `find_weights` found there, in that order.

    The views keep the mapping alive; pages are read when they are first touched.
    """
    with path.open("rb") as file:
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return {
        name: np.frombuffer(
            buffer, NUMPY_DTYPES[tensor.dtype], math.prod(tensor.shape), tensor.offset
        ).reshape(tensor.shape)
        for name, tensor in stored.items()
    }


def match_weights(
    path: Path,
    found: Mapping[str, StoredTensor],
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
        own, sizes = np.dtype(NUMPY_DTYPES[found[name].dtype]), found[name].shape
        if own != dtype or sizes != shape:
            problems.append(f"{name} is {own} {list(sizes)}, expected {dtype} {list(shape)}")
    if problems:
        raise WeightFileError(
            f"{path} does not fit the engine: {'; '.join(sorted(problems))}."
            " Build the engine from this checkpoint again"
        )
