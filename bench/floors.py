"""The least time that each op of a step can take: bytes it must move or operations it must do."""

from __future__ import annotations

from m3trt.bench.device_time import COPY_BYTES, FLOPS, READ_BYTES
from m3trt.convert.configuration import M3Config
from m3trt.convert.layout import rank_tensors


def step_floors(config: M3Config, requests: int, context: int, new: int) -> dict[str, float]:
    """Seconds by op for a step that adds `new` tokens to each of `requests` with `context` tokens
    before; logits of one token a request. The larger of bytes and operations counts, an op at a
    time; expert weights are read where random routing of the tokens is expected to need them."""
    item = 2 if config.dtype == "bfloat16" else 4
    sparse, moe, tokens = config.sparse_attention, config.moe, requests * new
    gemm_bytes = gemm_flops = moe_bytes = moe_flops = 0.0
    touched = 1 - (1 - moe.top_k / moe.num_experts) ** tokens
    for name, spec in rank_tensors(config).items():
        if len(spec.shape) < 2 or "embedding" in name:
            continue
        elements = 1
        for size in spec.shape:
            elements *= size
        if name == "lm_head.weight":
            gemm_bytes += spec.num_bytes
            gemm_flops += 2 * elements * requests
        elif len(spec.shape) == 3:
            moe_bytes += spec.num_bytes * touched
            moe_flops += 2 * elements * tokens * moe.top_k / moe.num_experts
        elif "shared_expert" in name or "router" in name:
            moe_bytes += spec.num_bytes
            moe_flops += 2 * elements * tokens
        else:
            gemm_bytes += spec.num_bytes
            gemm_flops += 2 * elements * tokens
    num_sparse = sum(config.sparse_layers)
    num_dense = config.num_hidden_layers - num_sparse
    length, heads = context + new, config.local_num_attention_heads
    kv_token = 2 * config.local_num_key_value_heads * config.head_size * item
    seen = new * context + new * (new + 1) / 2  # keys that the queries of one request see
    chosen = sum(min(p + 1, sparse.top_k * sparse.block_size) for p in range(context, length))
    pairs = 4 * heads * config.head_size  # operations a query and key: QK and PV
    scores = 2 * config.local_num_key_value_heads * sparse.index_head_size
    read = requests * (length if new > 1 else min(length, sparse.top_k * sparse.block_size))
    row = config.hidden_size * item
    return {
        "Embedding": 2 * tokens * row / COPY_BYTES,
        # read and written: two rows each, but in the first norm and in the last, of few rows
        "AddRmsNorm": (4 * (2 * config.num_hidden_layers - 1) + 2) * tokens * row / COPY_BYTES,
        "Gemm": max(gemm_bytes / READ_BYTES, gemm_flops / FLOPS),
        "MoE": max(moe_bytes / READ_BYTES, moe_flops / FLOPS),
        "PagedAttention": num_dense
        * max(requests * length * kv_token / READ_BYTES, requests * seen * pairs / FLOPS),
        "BlockSelect": num_sparse
        * max(
            requests * length * sparse.index_head_size * item / READ_BYTES,
            requests * seen * scores / FLOPS,
        ),
        "SparseAttention": num_sparse
        * max(read * kv_token / READ_BYTES, requests * chosen * pairs / FLOPS),
    }
