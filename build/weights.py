"""Compares the header of a safetensors file with the weights that a graph asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
from m3trt.build.graph import SAFETENSORS_DTYPES
from m3trt.build.tensors import is_weight

LISTED = 5
"""Differences that an error lists before it only counts."""


def check_weights(weights: Path, graph: Path) -> None:
    """Check names, shapes and dtypes; reads no weight.

    Raises:
        ValueError: the file is damaged, or the first differences between the two.
    """
    spelling = {value: key for key, value in SAFETENSORS_DTYPES.items()}
    expected = {}
    for value in onnx.load(graph).graph.input:
        if is_weight(value.name):
            kind = value.type.tensor_type
            shape = [dim.dim_value for dim in kind.shape.dim]
            expected[value.name] = f"{spelling[kind.elem_type]} {shape}"
    weights = weights.resolve()
    header = _read_header(weights)
    found = {name: f"{entry['dtype']} {entry['shape']}" for name, entry in header.items()}
    differences = [f"{name} is missing" for name in expected if name not in found]
    differences += [f"{name} is not expected" for name in found if name not in expected]
    differences += [
        f"{name} is {found[name]}, expected {expected[name]}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    if differences:
        more = f" and {len(differences) - LISTED} more" if len(differences) > LISTED else ""
        raise ValueError(
            f"{weights} does not fit {graph.name}: {'; '.join(differences[:LISTED])}{more}."
            " Build the engine again from this checkpoint"
        )


def _read_header(path: Path) -> dict[str, Any]:
    """name -> {dtype, shape, data_offsets}; checks that the file is as long as it says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path}: header of {length} bytes in a file of {size}: truncated")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path}: the header is not JSON ({error})") from error
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + length + end != size:
        raise ValueError(
            f"{path}: {size} bytes, its header needs {8 + length + end}: truncated or corrupt"
        )
    return dict(header)
