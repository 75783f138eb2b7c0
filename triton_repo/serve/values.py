"""Typed reading and making of request tensors without batch dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]


def scalar(arrays: Arrays, name: str, default: Any) -> Any:
    """The one element of tensor `name` as a Python value; `default` if it was not sent."""
    array = arrays.get(name)
    return default if array is None else array.reshape(-1)[0].item()


def text(arrays: Arrays, name: str) -> bytes | None:
    """The one string of tensor `name`, undecoded."""
    array = arrays.get(name)
    return None if array is None else _bytes(array.reshape(-1)[0])


def texts(arrays: Arrays, name: str) -> tuple[bytes, ...]:
    """The strings of tensor `name`, undecoded. Empty ones are left out: existing clients send
    one empty string for "none"."""
    array = arrays.get(name)
    found = () if array is None else (_bytes(item) for item in array.reshape(-1))
    return tuple(item for item in found if item)


def _bytes(item: Any) -> bytes:
    return item if isinstance(item, bytes) else str(item).encode()


def strings(*items: str) -> npt.NDArray[np.object_]:
    """A tensor of strings [n]."""
    return np.array([item.encode() for item in items], dtype=np.object_)


def int32(*items: int) -> npt.NDArray[np.int32]:
    """A tensor of integers [n]."""
    return np.array(items, dtype=np.int32)
