"""One step of the engine: the seam between the scheduler and whatever executes the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Host arrays of one step. Context requests come first, then decode requests.

    Shapes: `input_ids`, `position_ids` [tokens]; `cu_query_lens` [requests + 1];
    `sequence_length` [requests]; `kv_cache_block_offsets` [requests, max_pages];
    `logit_rows` [n]; `prompt_embedding_table` [rows >= 1, hidden] in the engine's dtype.
    `decode_shape` = (decode requests, q_len): the last D * q_len tokens are decode.
    """

    input_ids: Int32
    position_ids: Int32
    cu_query_lens: Int32
    sequence_length: Int32
    kv_cache_block_offsets: Int32
    decode_shape: tuple[int, int]
    logit_rows: Int32
    prompt_embedding_table: npt.NDArray[Any]


class StepExecutor(Protocol):
    """Runs steps of the text engine. Owns the weights and the paged caches of all its ranks."""

    num_pages: int

    def step(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """Run one step, update the caches in place and return logits fp32 [n, vocab_size]."""
        ...

    def close(self) -> None:
        """Release weights, caches and threads; the executor cannot be used afterwards."""
        ...


class VisionExecutor(Protocol):
    """Runs the vision engine."""

    def encode(
        self, patches: npt.NDArray[Any], positions: Int32, cu_seqlens: Int32
    ) -> npt.NDArray[Any]:
        """patches [N, patch_width], positions [N, 3], cu_seqlens [segments + 1] -> features
        [N / merge**2, hidden] in the engine's dtype."""
        ...

    def close(self) -> None: ...
