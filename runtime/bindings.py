"""What is bound to the text engine's inputs besides weights: per-step arrays, caches, scales."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from m3trt.build import tensors
from m3trt.convert.configuration import MAX_TENSOR_ELEMENTS, M3Config
from m3trt.runtime.step import StepInputs

CACHE_SCALE = 1.0
"""Scale of e4m3 caches. Keys are normed per head and lie far inside e4m3's range of 448, and M3's
checkpoints carry no scales."""


def step_arrays(inputs: StepInputs) -> dict[str, npt.NDArray[Any]]:
    """The per-step inputs by tensor name."""
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


def cache_names(config: M3Config) -> list[str]:
    """Every paged cache of one rank."""
    sparse = [layer for layer, is_sparse in enumerate(config.sparse_layers) if is_sparse]
    kv = [tensors.kv_cache(layer) for layer in range(config.num_hidden_layers)]
    return kv + [tensors.index_cache(layer) for layer in sparse]


def scale_names(config: M3Config) -> list[str]:
    """The scales that engines with e4m3 caches have; others have none of them."""
    layers = range(config.num_hidden_layers)
    kv = [tensors.kv_cache_scale(layer) for layer in layers]
    return kv + [tensors.index_cache_scale(layer) for layer in layers]


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
