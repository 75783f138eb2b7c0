from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from m3trt.convert.configuration import M3Config, MoeConfig, SparseAttentionConfig, VisionConfig

TINY = M3Config(
    architecture="MiniMaxM3SparseForConditionalGeneration",
    dtype="bfloat16",
    vocab_size=512,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_size=128,
    intermediate_size=96,
    hidden_act="swigluoai",
    swiglu_alpha=1.702,
    swiglu_limit=7.0,
    norm_epsilon=1e-6,
    max_position_embeddings=4096,
    rotary_dim=64,
    rotary_base=5e6,
    sparse_layers=(False, True, True),
    moe_layers=(False, True, True),
    sparse_attention=SparseAttentionConfig(
        num_index_heads=4, index_head_size=128, block_size=128, top_k=16, init_blocks=0,
        local_blocks=1,
    ),
    moe=MoeConfig(
        num_experts=8, top_k=2, intermediate_size=32, shared_intermediate_size=32,
        routed_scaling_factor=2.0,
    ),
    vision=VisionConfig(
        hidden_size=40, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        patch_size=14, num_channels=3, temporal_patch_size=2, spatial_merge_size=2,
        segment_max_frames=4, rotary_base=10000.0, norm_epsilon=1e-5, projector_hidden_size=64,
    ),
    image_token_id=500,
    video_token_id=501,
    bos_token_id=502,
    eos_token_id=503,
)  # fmt: skip


@pytest.fixture
def tiny() -> Callable[..., M3Config]:
    """Makes a tiny config with the released attention geometry and the given fields changed."""
    return lambda **changes: replace(TINY, **changes)
