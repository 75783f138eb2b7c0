"""Every tensor of a checkpoint directory: the seam between `convert`, `build` and `runtime`.

Linear weights are [out, in]. T is the model dtype; sizes are those of one rank. Rows of fused
tensors: qkv is q, k, v, then index q and index k on sparse layers; fc is gate, then up.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from m3trt.convert.configuration import MAX_TENSOR_ELEMENTS, ConfigError, M3Config, VisionConfig
from m3trt.convert.dtypes import item_bytes


class TensorSpec(NamedTuple):
    """Shape and dtype (safetensors' spelling: "BF16" or "F32") of one stored tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * item_bytes(self.dtype)


def model_dtype(config: M3Config) -> str:
    """The safetensors spelling of `config.dtype`."""
    return {"bfloat16": "BF16", "float32": "F32"}[config.dtype]


def rank_tensors(config: M3Config) -> dict[str, TensorSpec]:
    """The tensors of `rank{r}.safetensors`, in file order; the same for every rank.

    Raises:
        ConfigError: a tensor would have 2**31 elements or more.
    """
    dtype, hidden = model_dtype(config), config.hidden_size
    tensors = {
        "transformer.vocab_embedding.weight": TensorSpec((config.vocab_size, hidden), dtype),
        "lm_head.weight": TensorSpec((config.local_vocab_size, hidden), dtype),
        "transformer.ln_f.weight": TensorSpec((hidden,), "F32"),
    }
    for layer in range(config.num_hidden_layers):
        prefix = f"transformer.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = TensorSpec((hidden,), "F32")
        tensors |= _attention(config, prefix, layer)
        tensors[f"{prefix}.post_layernorm.weight"] = TensorSpec((hidden,), "F32")
        if config.moe_layers[layer]:
            tensors |= _moe(config, prefix)
        else:
            tensors |= _mlp(config, f"{prefix}.mlp", config.intermediate_size)
    return _checked(tensors, "use a larger tp_size")


def _checked(tensors: dict[str, TensorSpec], advice: str) -> dict[str, TensorSpec]:
    for name, spec in tensors.items():
        if prod(spec.shape) > MAX_TENSOR_ELEMENTS:
            raise ConfigError(
                f"{name} would be {list(spec.shape)}, {prod(spec.shape)} elements; TensorRT takes"
                f" at most {MAX_TENSOR_ELEMENTS}: {advice}"
            )
    return tensors


def _attention(config: M3Config, prefix: str, layer: int) -> dict[str, TensorSpec]:
    dtype, head, index = model_dtype(config), config.head_size, config.sparse_attention
    heads, kv_heads = config.local_num_attention_heads, config.local_num_key_value_heads
    sparse = config.sparse_layers[layer]
    rows = (heads + 2 * kv_heads) * head
    if sparse:
        rows += (kv_heads + 1) * index.index_head_size
    tensors = {
        f"{prefix}.attention.qkv.weight": TensorSpec((rows, config.hidden_size), dtype),
        f"{prefix}.attention.dense.weight": TensorSpec((config.hidden_size, heads * head), dtype),
        f"{prefix}.attention.q_layernorm.weight": TensorSpec((head,), "F32"),
        f"{prefix}.attention.k_layernorm.weight": TensorSpec((head,), "F32"),
    }
    if sparse:
        spec = TensorSpec((index.index_head_size,), "F32")
        tensors[f"{prefix}.attention.index_q_layernorm.weight"] = spec
        tensors[f"{prefix}.attention.index_k_layernorm.weight"] = spec
    return tensors


def _mlp(config: M3Config, prefix: str, intermediate_size: int) -> dict[str, TensorSpec]:
    dtype, hidden, width = model_dtype(config), config.hidden_size, intermediate_size
    width //= config.tp_size
    return {
        f"{prefix}.fc.weight": TensorSpec((2 * width, hidden), dtype),
        f"{prefix}.proj.weight": TensorSpec((hidden, width), dtype),
    }


def _moe(config: M3Config, prefix: str) -> dict[str, TensorSpec]:
    dtype, hidden, moe = model_dtype(config), config.hidden_size, config.moe
    width, experts = moe.intermediate_size // config.tp_size, moe.num_experts // config.expert_parts
    tensors = {
        f"{prefix}.mlp.router.weight": TensorSpec((moe.num_experts, hidden), "F32"),
        f"{prefix}.mlp.router.e_score_correction_bias": TensorSpec((moe.num_experts,), "F32"),
    }
    for which, shape in (
        ("fc", (experts, 2 * width, hidden)),
        ("proj", (experts, hidden, width)),
    ):
        for part in range(config.expert_parts):
            name = expert_stack(f"{prefix}.mlp.{which}", part, config.expert_parts)
            tensors[name] = TensorSpec(shape, dtype)
    shared = moe.shared_intermediate_size
    return tensors | _mlp(config, f"{prefix}.mlp.shared_expert", shared)


def expert_stack(prefix: str, part: int, parts: int) -> str:
    """Name of one part of an expert stack, e.g. `....mlp.fc` -> `....mlp.fc.part0.weight`."""
    return f"{prefix}.weight" if parts == 1 else f"{prefix}.part{part}.weight"


def vision_tensors(config: M3Config) -> dict[str, TensorSpec]:
    """The tensors of `vision.safetensors`, the same for all ranks; empty without a vision tower.

    Raises:
        ConfigError: a tensor would have 2**31 elements or more.
    """
    vision = config.vision
    if vision is None:
        return {}
    dtype, hidden, projector = model_dtype(config), vision.hidden_size, vision.projector_hidden_size
    features = config.hidden_size
    merged = features * vision.spatial_merge_size**2
    tensors = {
        "vision.patch_embedding.weight": TensorSpec((hidden, vision.patch_width), dtype),
        **_affine("vision.pre_layernorm", (hidden,), "F32"),
    }
    for layer in range(vision.num_hidden_layers):
        tensors |= _vision_layer(vision, f"vision.layers.{layer}", dtype)
    tensors |= {
        **_affine("vision.projector.fc", (projector, hidden), dtype),
        **_affine("vision.projector.proj", (features, projector), dtype),
        **_affine("vision.merger.fc", (projector, merged), dtype),
        **_affine("vision.merger.proj", (features, projector), dtype),
    }
    return _checked(tensors, "correct vision_config")


def _vision_layer(vision: VisionConfig, prefix: str, dtype: str) -> dict[str, TensorSpec]:
    hidden, width = vision.hidden_size, vision.intermediate_size
    return {
        **_affine(f"{prefix}.layernorm1", (hidden,), "F32"),
        **_affine(f"{prefix}.attention.qkv", (3 * hidden, hidden), dtype),
        **_affine(f"{prefix}.attention.dense", (hidden, hidden), dtype),
        **_affine(f"{prefix}.layernorm2", (hidden,), "F32"),
        **_affine(f"{prefix}.mlp.fc", (width, hidden), dtype),
        **_affine(f"{prefix}.mlp.proj", (hidden, width), dtype),
    }


def _affine(prefix: str, weight_shape: tuple[int, ...], dtype: str) -> dict[str, TensorSpec]:
    return {
        f"{prefix}.weight": TensorSpec(weight_shape, dtype),
        f"{prefix}.bias": TensorSpec(weight_shape[:1], dtype),
    }
