"""The released model, from its config alone: every tensor has a place, none is too large."""

from __future__ import annotations

import dataclasses
from math import prod
from pathlib import Path
from typing import Any

import pytest
from m3trt.convert.configuration import MAX_TENSOR_ELEMENTS
from m3trt.convert.hf_config import Mxfp8, SourceModel, parse_config
from m3trt.convert.layout import rank_tensors, vision_tensors
from m3trt.convert.plan import VISION_FILE, expand, make_plan
from m3trt.convert.reader import StoredTensor
from m3trt.convert.weights import TEXT_RULES, VISION_RULES, dimensions

pytestmark = pytest.mark.smoke

IGNORED = (
    "lm_head",
    "model.embed_tokens",
    "vision_tower",
    "multi_modal_projector",
    "patch_merge_mlp",
    *(f"language_model.model.layers.{i}.block_sparse_moe.gate" for i in range(3, 60)),
)


def released_tensors(model: SourceModel) -> dict[str, StoredTensor]:
    """The tensor list of the release that `model` describes."""
    sizes, stored = dimensions(model.config), {}
    for rules in (TEXT_RULES, VISION_RULES):
        for rule, name, _ in expand(rules, model.config):
            shape = tuple(sizes[symbol] for symbol in rule.shape.split())
            quantised = model.quantization and rule.linear and model.quantization.covers(name)
            dtype = "F8_E4M3" if quantised else "BF16"
            stored[name] = StoredTensor(name, Path("model.safetensors"), dtype, shape, 0)
            if quantised:
                scales, shape = f"{name}_scale_inv", (shape[0], shape[1] // 32)
                stored[scales] = StoredTensor(scales, Path("model.safetensors"), "U8", shape, 0)
    return stored


def test_rules_match_the_published_totals(released: dict[str, Any]) -> None:
    model = SourceModel(parse_config(released, {}), None)
    stored = released_tensors(model)
    assert len(stored) == 23_416
    assert sum(prod(tensor.shape) for tensor in stored.values()) == 427_040_140_160
    assert stored[
        "language_model.model.layers.59.block_sparse_moe.experts.127.w2.weight"
    ].shape == (6144, 3072)
    assert stored["vision_tower.vision_model.embeddings.patch_embedding.weight"].shape == (
        *(1280, 3, 2, 14, 14),
    )


def test_mxfp8_totals(released: dict[str, Any]) -> None:
    """Values, scales and the linears that stay bf16, as the MXFP8 release counts them."""
    model = SourceModel(parse_config(released, {}), Mxfp8(IGNORED))
    stored = released_tensors(model)
    by_dtype = {
        dtype: sum(prod(t.shape) for t in stored.values() if t.dtype == dtype)
        for dtype in ("F8_E4M3", "U8")
    }
    assert by_dtype == {"F8_E4M3": 423_670_579_200, "U8": 13_239_705_600}
    assert len(make_plan(model, stored).jobs) == 23_416


@pytest.mark.parametrize(("tp_size", "parts"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_every_rank_fits(released: dict[str, Any], tp_size: int, parts: int) -> None:
    config = parse_config(released, {}, tp_size=tp_size)
    tensors = rank_tensors(config)
    assert config.expert_parts == parts
    assert max(prod(spec.shape) for spec in tensors.values()) <= MAX_TENSOR_ELEMENTS
    stacks = [spec for name, spec in tensors.items() if ".layers.3.mlp.fc." in name]
    assert [spec.shape for spec in stacks] == [(128 // parts, 6144 // tp_size, 6144)] * parts

    plan = make_plan(SourceModel(config, None), released_tensors(SourceModel(config, None)))
    assert len(plan.files) == tp_size + 1
    for file in plan.files:
        assert plan.file_bytes(file) == sum(
            spec.num_bytes
            for spec in (vision_tensors(config) if file == VISION_FILE else tensors).values()
        )


def test_layouts_differ_only_where_the_layer_kinds_do(released: dict[str, Any]) -> None:
    config = parse_config(released, {})
    tensors = rank_tensors(dataclasses.replace(config, vision=None))
    assert tensors["transformer.layers.0.attention.qkv.weight"].shape == (9216, 6144)
    assert tensors["transformer.layers.3.attention.qkv.weight"].shape == (9216 + 640, 6144)
    assert "transformer.layers.2.attention.index_q_layernorm.weight" not in tensors
    assert tensors["transformer.layers.2.mlp.fc.weight"].shape == (24576, 6144)
    assert tensors["transformer.layers.3.mlp.router.weight"].dtype == "F32"
    assert vision_tensors(dataclasses.replace(config, vision=None)) == {}
