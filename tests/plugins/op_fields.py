"""Attributes of every op, as plugin fields: a valid value each, and some that must be refused."""

from __future__ import annotations

Value = int | float | str

OPS: dict[str, dict[str, Value]] = {
    "M3Embedding": {"vocab_size": 200064},
    "M3AddRmsNorm": {"has_residual": 1, "has_rows": 0, "epsilon": 1e-6},
    "M3Gemm": {"has_bias": 1, "epilogue": "gelu_erf", "output_dtype": "same"},
    "M3CacheUpdate": {
        "num_heads": 8,
        "num_kv_heads": 4,
        "num_index_heads": 4,
        "head_size": 128,
        "index_head_size": 128,
        "rotary_dim": 64,
        "epsilon": 1e-6,
    },
    "M3BlockSelect": {"block_size": 128, "top_k": 16, "init_blocks": 0, "local_blocks": 1},
    "M3SparseAttention": {"block_size": 128, "softmax_scale": 0.08838834764},
    "M3PagedAttention": {"block_size": 128, "softmax_scale": 0.08838834764},
    "M3VarlenAttention": {"softmax_scale": 0.1118034},
    "M3MoE": {
        "expert_parts": 2,
        "top_k": 4,
        "routed_scaling_factor": 2.0,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "M3AllReduce": {"group_size": 8},
    "M3AllGather": {"group_size": 8},
}

REFUSED: list[tuple[str, str, Value]] = [
    ("M3Embedding", "vocab_size", 0),
    ("M3AddRmsNorm", "has_rows", 2),
    ("M3AddRmsNorm", "epsilon", -1.0),
    ("M3Gemm", "has_bias", 2),
    ("M3Gemm", "has_bias", 0.5),
    ("M3Gemm", "epilogue", "gelu"),
    ("M3Gemm", "epilogue", "none|gelu_erf"),
    ("M3Gemm", "output_dtype", ""),
    ("M3Gemm", "output_dtype", 0),
    ("M3CacheUpdate", "head_size", 64),
    ("M3CacheUpdate", "rotary_dim", 256),
    ("M3BlockSelect", "top_k", 0),
    ("M3SparseAttention", "block_size", 64),
    ("M3PagedAttention", "softmax_scale", float("nan")),
    ("M3VarlenAttention", "softmax_scale", -1.0),
    ("M3MoE", "expert_parts", 0),
    ("M3MoE", "expert_parts", 9),
    ("M3MoE", "top_k", 33),
    ("M3MoE", "swiglu_limit", float("inf")),
    ("M3AllReduce", "group_size", 1),
    ("M3AllGather", "group_size", 0),
]
"""Op, field, value."""

LETTERS = {int: "i", float: "f", str: "s"}


def spelled(fields: dict[str, Value]) -> list[str]:
    """NAME=TYPE:VALUE of each, as field_round_trip.cpp takes them."""
    return [f"{name}={LETTERS[type(value)]}:{value}" for name, value in fields.items()]
