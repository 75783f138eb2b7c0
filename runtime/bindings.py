"""What is bound to the engine's inputs: per-step arrays, caches, cache scales, weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from m3trt.build import tensors
from m3trt.convert.configuration import MAX_TENSOR_ELEMENTS, M3Config
from m3trt.runtime.step import StepInputs

VISION_INPUTS = (tensors.PATCHES, tensors.POSITIONS, tensors.CU_SEQLENS)

CACHE_SCALE = 1.0
"""Scale of e4m3 caches. Keys are normed per head and lie far inside e4m3's range of 448, and M3's
checkpoints carry no scales."""


def step_arrays(inputs: StepInputs) -> dict[str, npt.NDArray[Any]]:
    """The per-step inputs of the text engine by tensor name."""
    return {
        tensors.INPUT_IDS: inputs.input_ids,
        tensors.PROMPT_EMBEDDING_TABLE: inputs.prompt_embedding_table,
        tensors.POSITION_IDS: inputs.position_ids,
        tensors.CU_QUERY_LENS: inputs.cu_query_lens,
        tensors.SEQUENCE_LENGTH: inputs.sequence_length,
        tensors.KV_CACHE_BLOCK_OFFSETS: inputs.kv_cache_block_offsets,
        tensors.DECODE_ROWS: np.zeros(inputs.decode_shape, np.int32),
        tensors.LOGIT_ROWS: inputs.logit_rows,
    }


STEP_INPUTS = (
    tensors.INPUT_IDS,
    tensors.PROMPT_EMBEDDING_TABLE,
    tensors.POSITION_IDS,
    tensors.CU_QUERY_LENS,
    tensors.SEQUENCE_LENGTH,
    tensors.KV_CACHE_BLOCK_OFFSETS,
    tensors.DECODE_ROWS,
    tensors.LOGIT_ROWS,
)


def cache_names(config: M3Config) -> list[str]:
    """Every paged cache of one rank."""
    sparse = [layer for layer, is_sparse in enumerate(config.sparse_layers) if is_sparse]
    kv = [tensors.kv_cache(layer) for layer in range(config.num_hidden_layers)]
    return kv + [tensors.index_cache(layer) for layer in sparse]


def scale_names(config: M3Config) -> list[str]:
    """The scales that an engine with e4m3 caches has; others have none of them."""
    layers = range(config.num_hidden_layers)
    kv = [tensors.kv_cache_scale(layer) for layer in layers]
    return kv + [tensors.index_cache_scale(layer) for layer in layers]


def weight_names(config: M3Config, inputs: Iterable[str]) -> list[str]:
    """Those of a text engine's `inputs` that come from `rank{r}.safetensors`."""
    other = {*STEP_INPUTS, *cache_names(config), *scale_names(config)}
    return [name for name in inputs if name not in other]


def check_size(name: str, shape: Iterable[int]) -> None:
    """Refuse a binding that TensorRT would silently miscompute.

    Raises:
        ValueError: `name` has 2**31 elements or more.
    """
    elements = math.prod(shape)
    if elements > MAX_TENSOR_ELEMENTS:
        raise ValueError(
            f"{name} would have {elements} elements, TensorRT takes at most"
            f" {MAX_TENSOR_ELEMENTS}: use fewer pages or a larger tp_size"
        )
