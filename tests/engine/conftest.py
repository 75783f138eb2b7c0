from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from m3trt.build.assemble import Compiler, write_engine_dir
from m3trt.build.configuration import BuildConfig
from m3trt.build.library import PLUGIN_LIBRARY
from m3trt.convert.configuration import M3Config, MoeConfig, SparseAttentionConfig, VisionConfig
from m3trt.convert.layout import TensorSpec, rank_tensors, vision_tensors

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


def write_weights(path: Path, tensors: dict[str, TensorSpec]) -> None:
    """A safetensors file of zeros."""
    header, offset = {}, 0
    for name, spec in tensors.items():
        end = offset + spec.num_bytes
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(offset))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes a checkpoint directory of zeros for a tiny config with the given fields changed."""

    def write(weights: bool = True, **changes: Any) -> Path:
        config, folder = replace(TINY, **changes), tmp_path / "checkpoint"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config.to_json()))
        (folder / "tokenizer.json").write_text("{}")
        for rank in range(config.tp_size if weights else 0):
            write_weights(folder / f"rank{rank}.safetensors", rank_tensors(config))
        if weights and config.vision is not None:
            write_weights(folder / "vision.safetensors", vision_tensors(config))
        return folder

    return write


@pytest.fixture
def engine(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Builds an engine directory for the reference executor from a tiny checkpoint."""

    def build(weights: bool = True, **changes: Any) -> Path:
        source, output = checkpoint(weights, **changes), tmp_path / "engine"
        limits = BuildConfig.for_model(replace(TINY, **changes))
        write_engine_dir(source, output, limits, Compiler("reference", PLUGIN_LIBRARY))
        return output

    return build


@pytest.fixture
def edit() -> Callable[..., None]:
    """Changes an engine's config.json: edit(engine_dir, function of the parsed object)."""

    def apply(engine_dir: Path, change: Callable[[dict[str, Any]], None]) -> None:
        file = engine_dir / "config.json"
        data = json.loads(file.read_text())
        change(data)
        file.write_text(json.dumps(data))

    return apply


@pytest.fixture(name="write_weights")
def write_weights_fixture() -> Callable[[Path, dict[str, TensorSpec]], None]:
    return write_weights
