"""Configurations of the tiny random checkpoints, in the released `config.json` spelling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes in which tiny checkpoints differ; everything else is common to all of them."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    block_size: int
    top_k_blocks: int
    vocab_size: int = 512
    max_position_embeddings: int = 4096
    image_token: int = 500
    video_token: int = 501
    bos_token: int | None = 502
    eos_token: int | None = 503
    """None: the key is absent, as in the release, and readers use 200034 and 200020."""


GEOMETRIES = {
    "small": Geometry(4, 2, head_dim=16, block_size=8, top_k_blocks=3),
    "real-blocks": Geometry(8, 4, head_dim=128, block_size=128, top_k_blocks=16),
    "gqa8": Geometry(32, 4, head_dim=128, block_size=128, top_k_blocks=16),
    "gqa16": Geometry(64, 4, head_dim=128, block_size=128, top_k_blocks=16),
    "parallel": Geometry(8, 4, head_dim=16, block_size=8, top_k_blocks=3),
    "demo": Geometry(
        8,
        4,
        head_dim=128,
        block_size=128,
        top_k_blocks=16,
        vocab_size=200064,
        max_position_embeddings=32768,
        image_token=200025,
        video_token=200026,
        bos_token=None,
        eos_token=None,
    ),
}
"""`small` crosses block borders within tens of tokens; `real-blocks` has the released attention
sizes but few heads, `gqa8` and `gqa16` also 8 and 16 query heads a KV head, as the released model
at TP 8 and at TP 1 to 4; `parallel` divides by 8 ranks; `demo` adds the real vocabulary, tokenizer
and chat template."""

NUM_LAYERS = 4
HIDDEN_SIZE = 64


def tiny_config(geometry: str, dtype: str = "bfloat16") -> dict[str, Any]:
    """The content of `config.json` for one of `GEOMETRIES`.

    Raises:
        ValueError: the geometry is unknown.
    """
    if geometry not in GEOMETRIES:
        raise ValueError(f"unknown geometry {geometry!r}, expected one of {sorted(GEOMETRIES)}")
    sizes = GEOMETRIES[geometry]
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "torch_dtype": dtype,
        "text_config": _text_config(sizes),
        "vision_config": _vision_config(),
        "image_token_index": sizes.image_token,
        "video_token_index": sizes.video_token,
        "image_seq_length": 576,
        "projector_hidden_size": HIDDEN_SIZE,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "process_image_mode": "dynamic_res",
        "tie_word_embeddings": False,
    }


def _text_config(sizes: Geometry) -> dict[str, Any]:
    from_layer_1 = [0] + [1] * (NUM_LAYERS - 1)
    special = {"bos_token_id": sizes.bos_token, "eos_token_id": sizes.eos_token}
    return {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.num_key_value_heads,
        "head_dim": sizes.head_dim,
        "rotary_dim": sizes.head_dim // 2,
        "partial_rotary_factor": 0.5,
        "rope_theta": 5000000,
        "max_position_embeddings": sizes.max_position_embeddings,
        "vocab_size": sizes.vocab_size,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "attention_output_gate": False,
        "hidden_act": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "dense_intermediate_size": 96,
        "intermediate_size": 32,
        "shared_intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "routed_scaling_factor": 2.0,
        "moe_layer_freq": from_layer_1,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_attention_freq": from_layer_1,
            "sparse_num_index_heads": sizes.num_key_value_heads,
            "sparse_index_dim": sizes.head_dim,
            "sparse_block_size": sizes.block_size,
            "sparse_topk_blocks": sizes.top_k_blocks,
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_score_type": "max",
            "sparse_disable_index_value": from_layer_1,
        },
        **{key: value for key, value in special.items() if value is not None},
    }


def _vision_config() -> dict[str, Any]:
    """Head size 20 of which 18 channels rotate, as 78 of 80 do in the release."""
    return {
        "model_type": "clip_vision_model",
        "hidden_size": 40,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "patch_size": 14,
        "image_size": 2016,
        "num_channels": 3,
        "projection_dim": HIDDEN_SIZE,
        "position_embedding_type": "rope",
        "rope_mode": "3d",
        "rope_theta": 10000.0,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "attention_dropout": 0.0,
        "vision_segment_max_frames": 4,
        "img_token_compression_config": {
            "image_token_compression_method": "patch_merge",
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }


def quantization_config(text_config: dict[str, Any]) -> dict[str, Any]:
    """The `quantization_config` of an MXFP8 checkpoint, in the released spelling."""
    gates = [
        f"language_model.model.layers.{layer}.block_sparse_moe.gate"
        for layer, is_moe in enumerate(text_config["moe_layer_freq"])
        if is_moe
    ]
    return {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [1, 32],
        "ignored_layers": [
            "lm_head",
            "model.embed_tokens",
            "vision_tower",
            "multi_modal_projector",
            "patch_merge_mlp",
            *gates,
        ],
    }
