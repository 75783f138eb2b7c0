"""Compares the header of a safetensors file with the weights that a graph asks for."""

from __future__ import annotations

from pathlib import Path

import onnx
from m3trt.build.graph import SAFETENSORS_DTYPES
from m3trt.build.tensors import is_weight
from m3trt.convert.errors import listed
from m3trt.convert.reader import read_header


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
    stored = read_header(weights.resolve())
    found = {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in stored.items()}
    differences = [f"{name} is missing" for name in expected if name not in found]
    differences += [f"{name} is not expected" for name in found if name not in expected]
    differences += [
        f"{name} is {found[name]}, expected {expected[name]}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    if differences:
        raise ValueError(
            f"{weights.resolve()} does not fit {graph.name}: {listed(differences)}."
            " Build the engine again from this checkpoint"
        )
