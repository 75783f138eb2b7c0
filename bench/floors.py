"""The least time that each op of a step can take: bytes it must move or operations it must do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from m3trt.bench.device_time import COPY_BYTES, FLOPS, LINK_BYTES, READ_BYTES
from m3trt.bench.routing import expected_experts
from m3trt.convert.configuration import M3Config
from m3trt.convert.layout import rank_tensors

HEAD = 128
"""Channels of a head of attention."""


class Floor(NamedTuple):
    """`amount` of `unit` ("bytes" or "flops") at `rate` a second."""

    amount: float
    rate: float
    unit: str = "bytes"

    @property
    def seconds(self) -> float:
        return self.amount / self.rate


def floor_fields(floors: Mapping[str, Floor]) -> dict[str, Any]:
    """Of a step's record: its floor, that of every op, and the work that it is the time of."""
    seconds = {op: floor.seconds for op, floor in floors.items()}
    work = {op: {"amount": floor.amount, "unit": floor.unit} for op, floor in floors.items()}
    return {"floor_seconds": sum(seconds.values()), "floors": seconds, "work": work}


def larger(num_bytes: float, flops: float) -> Floor:
    """Whichever takes longer, reading the bytes or computing."""
    return max(
        Floor(num_bytes, READ_BYTES),
        Floor(flops, FLOPS, "flops"),
        key=lambda floor: floor.seconds,
    )


def dense_attention(case: dict[str, Any]) -> Floor:
    """Of a decode step reading its caches, of a chunk its products."""
    if "batch" in case:
        item = 2 if case["dtype"] == "bfloat16" else 1
        read = case["batch"] * case["context"] * 2 * case["kv_heads"] * HEAD * item
        return Floor(read, READ_BYTES)
    new, prefix = case["new"], case["prefix"]
    products = 4 * HEAD * case["q_heads"] * (new * prefix + new * (new + 1) / 2)
    return Floor(products, FLOPS, "flops")


def step_floors(
    config: M3Config, requests: int, context: int, new: int, collectives: bool = False
) -> dict[str, Floor]:
    """Floors by op for a step that adds `new` tokens to each of `requests` with `context` tokens
    before; logits of one token a request. The larger of bytes and operations counts, an op at a
    time; expert weights are read where random routing of the tokens is expected to need them.
    Collectives of a rank move what a ring sends, at the data sheet's rate of NVLink."""
    item = 2 if config.dtype == "bfloat16" else 4
    sparse, moe, tokens = config.sparse_attention, config.moe, requests * new
    gemm_bytes = gemm_flops = moe_bytes = moe_flops = 0.0
    qkv_rows = 0
    touched = expected_experts(config, tokens) / moe.num_experts
    for name, spec in rank_tensors(config).items():
        if len(spec.shape) < 2 or "embedding" in name:
            continue
        elements = math.prod(spec.shape)
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
            qkv_rows += spec.shape[0] if name.endswith("attention.qkv.weight") else 0
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
    floors = {
        "Embedding": Floor(2 * tokens * row, COPY_BYTES),
        # read and written: two rows each, but in the first norm and in the last, of few rows
        "AddRmsNorm": Floor(
            (4 * (2 * config.num_hidden_layers - 1) + 2) * tokens * row, COPY_BYTES
        ),
        "Gemm": larger(gemm_bytes, gemm_flops),
        "CacheUpdate": Floor(2 * tokens * qkv_rows * item, COPY_BYTES),  # read and written
        "MoE": larger(moe_bytes, moe_flops),
        "PagedAttention": larger(
            num_dense * requests * length * kv_token, num_dense * requests * seen * pairs
        ),
        "BlockSelect": larger(
            num_sparse * requests * length * sparse.index_head_size * item,
            num_sparse * requests * seen * scores,
        ),
        "SparseAttention": larger(
            num_sparse * read * kv_token, num_sparse * requests * chosen * pairs
        ),
    }
    if collectives and config.tp_size > 1:
        others = (config.tp_size - 1) / config.tp_size
        sums = 2 * config.num_hidden_layers * tokens * row
        logits = requests * config.vocab_size * 4
        floors["AllReduce"] = Floor(2 * others * sums, LINK_BYTES)
        floors["AllGather"] = Floor(others * logits, LINK_BYTES)
    return floors
