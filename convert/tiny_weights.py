"""Random weights of a tiny checkpoint, tensor by tensor, under the released names.

The scales make bugs visible: linear layers have std 1.5 / sqrt(fan_in), norm offsets 0.2 and the
routing bias 0.3, so that no term of the model is close to an identity or to zero.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Kind = Literal["linear", "matrix", "norm", "layer_norm", "bias", "routing_bias"]

MXFP8_BLOCK = 32
"""Values of one row that share a scale."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor: `linear` is what MXFP8 quantises, `matrix` any other weight matrix."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    keep_float32: bool = False


@dataclass(frozen=True, slots=True)
class ConstantChannel:
    """A residual channel that always holds `value`, and the head's weights on it [vocab_size].

    Random weights over a vocabulary of which few ids have a token would emit ids without one. A
    channel that no layer writes to lets the head rule them out.
    """

    value: float
    norm_weight: float
    head: Float32


def plan_tensors(config: dict[str, Any]) -> Iterator[TensorPlan]:
    """All tensors of the checkpoint described by a released-spelling `config`."""
    text = config["text_config"]
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    root = "language_model.model"
    yield TensorPlan(f"{root}.embed_tokens.weight", (vocab, hidden), "matrix")
    for layer in range(text["num_hidden_layers"]):
        yield from _attention(text, layer, f"{root}.layers.{layer}")
        yield from _mlp(text, layer, f"{root}.layers.{layer}")
    yield TensorPlan(f"{root}.norm.weight", (hidden,), "norm")
    yield TensorPlan("language_model.lm_head.weight", (vocab, hidden), "matrix")
    yield from _vision(config)


def _attention(text: dict[str, Any], layer: int, prefix: str) -> Iterator[TensorPlan]:
    hidden, head = text["hidden_size"], text["head_dim"]
    queries, keys = text["num_attention_heads"] * head, text["num_key_value_heads"] * head
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield TensorPlan(f"{prefix}.{norm}.weight", (hidden,), "norm")
    prefix = f"{prefix}.self_attn"
    yield TensorPlan(f"{prefix}.q_proj.weight", (queries, hidden), "linear")
    yield TensorPlan(f"{prefix}.k_proj.weight", (keys, hidden), "linear")
    yield TensorPlan(f"{prefix}.v_proj.weight", (keys, hidden), "linear")
    yield TensorPlan(f"{prefix}.o_proj.weight", (hidden, queries), "linear")
    yield TensorPlan(f"{prefix}.q_norm.weight", (head,), "norm")
    yield TensorPlan(f"{prefix}.k_norm.weight", (head,), "norm")
    sparse = text["sparse_attention_config"]
    if sparse["sparse_attention_freq"][layer]:
        size = sparse["sparse_index_dim"]
        heads = sparse["sparse_num_index_heads"] * size
        yield TensorPlan(f"{prefix}.index_q_proj.weight", (heads, hidden), "linear")
        yield TensorPlan(f"{prefix}.index_k_proj.weight", (size, hidden), "linear")
        yield TensorPlan(f"{prefix}.index_q_norm.weight", (size,), "norm")
        yield TensorPlan(f"{prefix}.index_k_norm.weight", (size,), "norm")


def _mlp(text: dict[str, Any], layer: int, prefix: str) -> Iterator[TensorPlan]:
    hidden = text["hidden_size"]
    if not text["moe_layer_freq"][layer]:
        yield from _gated(f"{prefix}.mlp", hidden, text["dense_intermediate_size"])
        return
    prefix, experts = f"{prefix}.block_sparse_moe", text["num_local_experts"]
    yield TensorPlan(f"{prefix}.gate.weight", (experts, hidden), "matrix", keep_float32=True)
    yield TensorPlan(
        f"{prefix}.e_score_correction_bias", (experts,), "routing_bias", keep_float32=True
    )
    width = text["intermediate_size"]
    for expert in range(experts):
        yield TensorPlan(f"{prefix}.experts.{expert}.w1.weight", (width, hidden), "linear")
        yield TensorPlan(f"{prefix}.experts.{expert}.w3.weight", (width, hidden), "linear")
        yield TensorPlan(f"{prefix}.experts.{expert}.w2.weight", (hidden, width), "linear")
    yield from _gated(f"{prefix}.shared_experts", hidden, text["shared_intermediate_size"])


def _gated(prefix: str, hidden: int, width: int) -> Iterator[TensorPlan]:
    yield TensorPlan(f"{prefix}.gate_proj.weight", (width, hidden), "linear")
    yield TensorPlan(f"{prefix}.up_proj.weight", (width, hidden), "linear")
    yield TensorPlan(f"{prefix}.down_proj.weight", (hidden, width), "linear")


def _vision(config: dict[str, Any]) -> Iterator[TensorPlan]:
    vision, text_hidden = config["vision_config"], config["text_config"]["hidden_size"]
    hidden, width = vision["hidden_size"], vision["intermediate_size"]
    projected, patch = config["projector_hidden_size"], vision["patch_size"]
    compression = vision["img_token_compression_config"]
    merged = compression["spatial_merge_size"] ** 2 * text_hidden
    root = "vision_tower.vision_model"
    yield TensorPlan(
        f"{root}.embeddings.patch_embedding.weight",
        (hidden, vision["num_channels"], compression["temporal_patch_size"], patch, patch),
        "matrix",
        keep_float32=True,
    )
    yield from _biased(f"{root}.pre_layrnorm", (hidden,), "layer_norm")
    for layer in range(vision["num_hidden_layers"]):
        prefix = f"{root}.encoder.layers.{layer}"
        for norm in ("layer_norm1", "layer_norm2"):
            yield from _biased(f"{prefix}.{norm}", (hidden,), "layer_norm")
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _biased(f"{prefix}.self_attn.{name}", (hidden, hidden))
        yield from _biased(f"{prefix}.mlp.fc1", (width, hidden))
        yield from _biased(f"{prefix}.mlp.fc2", (hidden, width))
    yield from _biased("multi_modal_projector.linear_1", (projected, hidden))
    yield from _biased("multi_modal_projector.linear_2", (text_hidden, projected))
    yield from _biased("patch_merge_mlp.linear_1", (projected, merged))
    yield from _biased("patch_merge_mlp.linear_2", (text_hidden, projected))


def _biased(
    prefix: str, shape: tuple[int, ...], kind: Kind = "matrix"
) -> tuple[TensorPlan, TensorPlan]:
    return (
        TensorPlan(f"{prefix}.weight", shape, kind),
        TensorPlan(f"{prefix}.bias", shape[:1], "bias"),
    )


def draw(plan: TensorPlan, seed: int, constant: ConstantChannel | None = None) -> Float32:
    """The values of one tensor; they depend on its name, its shape and `seed` only."""
    rng = np.random.default_rng([seed, zlib.crc32(plan.name.encode())])
    values = rng.standard_normal(plan.shape, dtype=np.float32)
    if plan.kind in ("linear", "matrix"):
        values *= np.float32(1.5 / np.sqrt(np.prod(plan.shape[1:])))
    else:
        std = {"norm": 0.2, "layer_norm": 0.2, "bias": 0.1, "routing_bias": 0.3}[plan.kind]
        values *= np.float32(std)
        values += np.float32(plan.kind == "layer_norm")
    if constant is not None:
        _keep_channel_constant(plan.name, values, constant)
    return values


def _keep_channel_constant(name: str, values: Float32, constant: ConstantChannel) -> None:
    writes_to_residual = (".o_proj.", ".down_proj.", ".w2.", "patch_merge_mlp.linear_2.weight")
    if name.endswith("embed_tokens.weight"):
        values[:, 0] = constant.value
    elif name == "patch_merge_mlp.linear_2.bias":
        values[0] = constant.value
    elif any(part in name for part in writes_to_residual):
        values[0] = 0.0
    elif name.endswith("layernorm.weight"):
        values[0] = -1.0
    elif name == "language_model.model.norm.weight":
        values[0] = constant.norm_weight
    elif name == "language_model.lm_head.weight":
        values[:, 0] = constant.head


def quantise_mxfp8(values: Float32) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]:
    """MXFP8 of [out, in]: e4m3 values [out, in] and E8M0 scale bytes [out, in / 32].

    value = e4m3 * 2 ** (byte - 127); the scale puts a block's largest value in e4m3's top binade.
    """
    blocks = values.reshape(values.shape[0], -1, MXFP8_BLOCK)
    largest = np.abs(blocks).max(axis=-1)
    exponent = np.where(largest > 0, np.frexp(largest)[1] - 9, 0)
    scaled = np.clip(np.ldexp(blocks, -exponent[..., None]), -448.0, 448.0)
    e4m3 = scaled.astype(ml_dtypes.float8_e4m3fn).reshape(values.shape)
    return e4m3, (exponent + 127).astype(np.uint8)
