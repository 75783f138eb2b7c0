"""M3Embedding: the tokens' rows of the vocabulary or of the prompt table."""

from __future__ import annotations

import numpy as np
from m3trt.runtime.reference.numerics import Array, Int32
from m3trt.runtime.reference.op import M3Op


class M3Embedding(M3Op):
    """ids int32 [N], words T [V, H], prompt table T [R, H] -> T [N, H]; an id from V on is row
    id - V of the table."""

    fields = ("vocab_size",)

    def _run(self, ids: Int32, words: Array, prompt_table: Array, vocab_size: int) -> tuple[Array]:
        if len(words) != vocab_size:
            raise self.error(f"vocab_size {vocab_size}, found words {list(words.shape)}")
        end = vocab_size + len(prompt_table)
        if ids.size and not 0 <= ids.min() <= ids.max() < end:
            raise self.error(f"ids span {ids.min()} to {ids.max()}, expected 0 to {end - 1}")
        is_word = ids < vocab_size
        out = words[np.where(is_word, ids, 0)]
        out[~is_word] = prompt_table[ids[~is_word] - vocab_size]
        return (out,)
