"""Names of the engine's inputs and outputs: the one place where they are spelled.

Shapes (P = pages, B = tokens per block = MSA block, T = model dtype):

| tensor | dtype, shape |
| --- | --- |
| input_ids | int32 [tokens]; an id >= vocab_size picks row id - vocab_size of the table below |
| prompt_embedding_table | T [rows >= 1, hidden] |
| position_ids | int32 [tokens] |
| cu_query_lens | int32 [requests + 1]; its last entry is the number of real tokens |
| sequence_length | int32 [requests], including this step's tokens; 0 = padded decode row |
| kv_cache_block_offsets | int32 [requests, max_pages]; -1 beyond the end |
| decode_rows | int32 [decode requests, q_len]; only its shape is read |
| logit_rows | int32 [n] token rows to compute logits for |
| kv_cache_{l} | T or e4m3 [P, 2, B, kv_heads, head_size], updated in place |
| index_cache_{l} | T or e4m3 [P, B, index_head_size], sparse layers only, updated in place |
| kv_cache_scale_{l}, index_cache_scale_{l} | fp32 [1], e4m3 caches only: real = stored * scale |
| logits | fp32 [n, vocab_size] |

Vision engine: `patches` T [N, patch_width], `positions` int32 [N, 3] (t, h, w), `cu_seqlens` int32
[segments + 1] -> `features` T [N / merge^2, hidden].

A compiled engine has an `input@op type` for each type of op that reads one of the small inputs of
a step (separate_inputs.py).
"""

from __future__ import annotations

INPUT_IDS = "input_ids"
PROMPT_EMBEDDING_TABLE = "prompt_embedding_table"
POSITION_IDS = "position_ids"
CU_QUERY_LENS = "cu_query_lens"
SEQUENCE_LENGTH = "sequence_length"
KV_CACHE_BLOCK_OFFSETS = "kv_cache_block_offsets"
DECODE_ROWS = "decode_rows"
LOGIT_ROWS = "logit_rows"
LOGITS = "logits"

PATCHES = "patches"
POSITIONS = "positions"
CU_SEQLENS = "cu_seqlens"
FEATURES = "features"


def kv_cache(layer: int) -> str:
    return f"kv_cache_{layer}"


def index_cache(layer: int) -> str:
    return f"index_cache_{layer}"


def updated(cache: str) -> str:
    """The output that aliases cache input `cache`; bind both to one address."""
    return f"{cache}_out"


def kv_cache_scale(layer: int) -> str:
    return f"kv_cache_scale_{layer}"


def index_cache_scale(layer: int) -> str:
    return f"index_cache_scale_{layer}"


def is_weight(name: str) -> bool:
    """Whether a graph input comes from the checkpoint: only their names have a dotted path."""
    return "." in name
