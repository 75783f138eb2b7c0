"""The range of every named dimension, and the check that no tensor can outgrow TensorRT."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import onnx
from m3trt.build.configuration import MAX_QUERY_LEN, BuildConfig
from m3trt.build.tensors import is_weight
from m3trt.convert.configuration import MAX_TENSOR_ELEMENTS, ConfigError, M3Config

Shape = tuple[int, ...]
ShapeRange = tuple[Shape, Shape, Shape]
"""Smallest, typical and largest shape of an input, as an optimisation profile takes them."""


class DimensionRange(NamedTuple):
    """Limits of a named dimension, and the option that sets the largest."""

    smallest: int
    typical: int
    largest: int
    option: str


def text_dimensions(config: M3Config, build: BuildConfig) -> dict[str, DimensionRange]:
    """Typical is a decode step of a full batch."""
    batch, tokens = build.max_batch_size, build.max_num_tokens
    table = build.max_pages_per_sequence(config)
    return {
        "tokens": DimensionRange(1, batch, tokens, "max_num_tokens"),
        "requests": DimensionRange(1, batch, batch, "max_batch_size"),
        "requests+1": DimensionRange(2, batch + 1, batch + 1, "max_batch_size"),
        "max_pages": DimensionRange(1, table, table, "max_seq_len"),
        "pages": DimensionRange(1, build.max_pages, build.max_pages, "max_pages"),
        "decode_requests": DimensionRange(0, batch, batch, "max_batch_size"),
        "q_len": DimensionRange(1, 1, MAX_QUERY_LEN, "max_batch_size"),
        "logit_rows": DimensionRange(0, batch, build.max_logit_rows, "max_num_tokens"),
        "prompt_rows": DimensionRange(1, 1, max(1, build.max_multimodal_len), "max_multimodal_len"),
    }


def vision_dimensions(config: M3Config, build: BuildConfig) -> dict[str, DimensionRange]:
    """Typical is one image of 576 tokens, or the most allowed if that is less.

    Raises:
        ConfigError: the build leaves no room for a single image token.
    """
    assert config.vision is not None
    most = build.max_multimodal_len
    if most < 1:
        raise ConfigError("max_multimodal_len is 0, expected at least 1: the model has vision")
    group, typical = config.vision.spatial_merge_size**2, min(576, most)
    option = "max_multimodal_len"
    return {
        "patches": DimensionRange(group, typical * group, most * group, option),
        "features": DimensionRange(1, typical, most, option),
        "segments+1": DimensionRange(2, 2, most + 1, option),
    }


def input_ranges(
    model: onnx.ModelProto, dimensions: Mapping[str, DimensionRange]
) -> dict[str, ShapeRange]:
    """The profile: shape ranges of the inputs that are not weights."""
    ranges = {}
    for value in model.graph.input:
        if not is_weight(value.name):
            dims = [_range(dim, dimensions) for dim in value.type.tensor_type.shape.dim]
            ranges[value.name] = (
                tuple(dim.smallest for dim in dims),
                tuple(dim.typical for dim in dims),
                tuple(dim.largest for dim in dims),
            )
    return ranges


def check_sizes(model: onnx.ModelProto, dimensions: Mapping[str, DimensionRange]) -> None:
    """Refuse tensors of 2**31 elements or more, with which TensorRT silently miscomputes.

    Raises:
        ConfigError: names the first such tensor, its largest shape and the options to lower.
    """
    graph = model.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        dims = [_range(dim, dimensions) for dim in value.type.tensor_type.shape.dim]
        elements = prod(dim.largest for dim in dims)
        if elements > MAX_TENSOR_ELEMENTS:
            options = sorted({dim.option for dim in dims if dim.option})
            raise ConfigError(
                f"{value.name} could be {[dim.largest for dim in dims]}, {elements} elements;"
                f" TensorRT takes at most {MAX_TENSOR_ELEMENTS}: lower"
                f" {' or '.join(options) or 'the shard with a larger tp_size'}"
            )


def _range(
    dim: onnx.TensorShapeProto.Dimension, dimensions: Mapping[str, DimensionRange]
) -> DimensionRange:
    if dim.dim_param:
        return dimensions[dim.dim_param]
    return DimensionRange(dim.dim_value, dim.dim_value, dim.dim_value, "")
