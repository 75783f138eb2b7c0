"""Where each value of the configuration stands in a Hugging Face `config.json`, as data.

| spelling | layer maps | sparse attention | rotation | hidden_act |
| --- | --- | --- | --- | --- |
| released | moe_layer_freq, sparse_attention_freq | sparse_* | rope_theta | swigluoai |
| saved by transformers | mlp_layer_types, layer_types | index_* | rope_parameters | silu (sic) |
| adapters of servers | either or both | both | either | either |
"""

from __future__ import annotations

from typing import Any

MODEL_TYPE = "minimax_m3_vl"
TEXT, VISION = "text_config", "vision_config"
SPARSE = f"{TEXT}.sparse_attention_config"

KeyTable = dict[str, tuple[type[int] | type[float], tuple[str, ...]]]
"""Field of our configuration -> (int or float, dotted keys that may hold it)."""

TEXT_KEYS: KeyTable = {
    "vocab_size": (int, (f"{TEXT}.vocab_size",)),
    "hidden_size": (int, (f"{TEXT}.hidden_size",)),
    "num_hidden_layers": (int, (f"{TEXT}.num_hidden_layers",)),
    "num_attention_heads": (int, (f"{TEXT}.num_attention_heads",)),
    "num_key_value_heads": (int, (f"{TEXT}.num_key_value_heads",)),
    "head_size": (int, (f"{TEXT}.head_dim",)),
    "intermediate_size": (int, (f"{TEXT}.dense_intermediate_size",)),
    "swiglu_alpha": (float, (f"{TEXT}.swiglu_alpha",)),
    "swiglu_limit": (float, (f"{TEXT}.swiglu_limit",)),
    "norm_epsilon": (float, (f"{TEXT}.rms_norm_eps",)),
    "max_position_embeddings": (int, (f"{TEXT}.max_position_embeddings",)),
    "rotary_base": (float, (f"{TEXT}.rope_theta", f"{TEXT}.rope_parameters.rope_theta")),
}
SPARSE_KEYS: KeyTable = {
    "num_index_heads": (int, (f"{SPARSE}.sparse_num_index_heads", f"{TEXT}.index_n_heads")),
    "index_head_size": (int, (f"{SPARSE}.sparse_index_dim", f"{TEXT}.index_head_dim")),
    "block_size": (int, (f"{SPARSE}.sparse_block_size", f"{TEXT}.index_block_size")),
    "top_k": (int, (f"{SPARSE}.sparse_topk_blocks", f"{TEXT}.index_topk_blocks")),
    "local_blocks": (int, (f"{SPARSE}.sparse_local_block", f"{TEXT}.index_local_blocks")),
}
MOE_KEYS: KeyTable = {
    "num_experts": (int, (f"{TEXT}.num_local_experts",)),
    "top_k": (int, (f"{TEXT}.num_experts_per_tok",)),
    "intermediate_size": (int, (f"{TEXT}.intermediate_size",)),
    "shared_intermediate_size": (int, (f"{TEXT}.shared_intermediate_size",)),
    "routed_scaling_factor": (float, (f"{TEXT}.routed_scaling_factor",)),
}
COMPRESSION = f"{VISION}.img_token_compression_config"
VISION_KEYS: KeyTable = {
    "hidden_size": (int, (f"{VISION}.hidden_size",)),
    "num_hidden_layers": (int, (f"{VISION}.num_hidden_layers",)),
    "num_attention_heads": (int, (f"{VISION}.num_attention_heads",)),
    "intermediate_size": (int, (f"{VISION}.intermediate_size",)),
    "patch_size": (int, (f"{VISION}.patch_size",)),
    "num_channels": (int, (f"{VISION}.num_channels",)),
    "temporal_patch_size": (
        int,
        (f"{COMPRESSION}.temporal_patch_size", f"{VISION}.temporal_patch_size"),
    ),
    "spatial_merge_size": (
        int,
        (f"{COMPRESSION}.spatial_merge_size", f"{VISION}.spatial_merge_size"),
    ),
    "segment_max_frames": (int, (f"{VISION}.vision_segment_max_frames",)),
    "rotary_base": (float, (f"{VISION}.rope_theta", f"{VISION}.rope_parameters.rope_theta")),
    "norm_epsilon": (float, (f"{VISION}.layer_norm_eps",)),
    "projector_hidden_size": (int, ("projector_hidden_size",)),
}

TOKEN_KEYS: KeyTable = {
    "image_token_id": (int, ("image_token_index", "image_token_id")),
    "video_token_id": (int, ("video_token_index", "video_token_id")),
}

SUPPORTED: dict[str, tuple[Any, ...]] = {
    # Keys that choose what the model computes: where one is present, only these values are built.
    "tie_word_embeddings": (False,),
    f"{TEXT}.tie_word_embeddings": (False,),
    f"{TEXT}.attention_output_gate": (False,),
    f"{TEXT}.attention_bias": (False,),
    f"{TEXT}.mlp_bias": (False,),
    f"{TEXT}.use_gemma_norm": (True,),
    f"{TEXT}.use_qk_norm": (True,),
    f"{TEXT}.qk_norm_type": ("per_head",),
    f"{TEXT}.scoring_func": ("sigmoid",),
    f"{TEXT}.use_routing_bias": (True,),
    f"{TEXT}.n_shared_experts": (1,),
    f"{TEXT}.use_index_cache": (False,),
    f"{TEXT}.rope_parameters.rope_type": ("default",),
    f"{TEXT}.rope_scaling.rope_type": ("default",),
    f"{TEXT}.rope_scaling.type": ("default",),
    f"{SPARSE}.use_sparse_attention": (True,),
    f"{SPARSE}.sparse_score_type": ("max",),
    f"{VISION}.hidden_act": ("gelu",),
    f"{VISION}.position_embedding_type": ("rope",),
    f"{VISION}.rope_mode": ("3d",),
    f"{VISION}.rope_parameters.rope_type": ("axial", "default"),
    f"{COMPRESSION}.image_token_compression_method": ("patch_merge",),
    "projector_hidden_act": ("gelu",),
    "multimodal_projector_bias": (True,),
    "vision_feature_layer": (-1,),
    "vision_feature_select_strategy": ("full",),
    "process_image_mode": ("dynamic_res",),
}
ROPE_KEYS = {"rope_theta", "partial_rotary_factor", "rope_type", "type"}

DEFAULT_TOKENS = {"bos_token_id": 200034, "eos_token_id": 200020}
"""The released files name these nowhere; transformers' class holds them."""
