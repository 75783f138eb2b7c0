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
        is_word = ids < vocab_size
        from_words = words[np.where(is_word, ids, 0)]
        from_table = prompt_table[np.where(is_word, 0, ids - vocab_size)]
        return (np.where(is_word[:, None], from_words, from_table),)
