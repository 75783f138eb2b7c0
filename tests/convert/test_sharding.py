"""Ranks reassemble to the source bit by bit, by slicing written out here and not by the rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from m3trt.convert.configuration import M3Config

pytestmark = pytest.mark.smoke

LM = "language_model.model"


def bits(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def assert_same(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(bits(found), bits(expected))


def split(values: npt.NDArray[Any], *sizes: int) -> list[npt.NDArray[Any]]:
    """Cut along the first axis into pieces of `sizes`, which have to cover it."""
    assert sum(sizes) == len(values)
    return np.split(values, np.cumsum(sizes)[:-1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_ranks_reassemble(
    tiny: Callable[..., Path],
    convert: Callable[..., Any],
    load_tensors: Callable[[Path], dict[str, npt.NDArray[Any]]],
    tmp_path: Path,
    tp_size: int,
    dtype: str,
) -> None:
    model_dir = tiny("parallel", dtype)
    result = convert(model_dir, "--tp_size", str(tp_size), "--workers", "3")
    assert result.code == 0, result.err
    config = M3Config.load(tmp_path / "output")
    assert (config.tp_size, config.dtype) == (tp_size, dtype)
    source = load_tensors(model_dir)
    ranks = [load_tensors(tmp_path / "output" / f"rank{r}.safetensors") for r in range(tp_size)]

    for rank in ranks:
        assert_same(rank["transformer.vocab_embedding.weight"], source[f"{LM}.embed_tokens.weight"])
        assert_same(rank["transformer.ln_f.weight"], gemma(source[f"{LM}.norm.weight"]))
    assert_same(
        np.concatenate([rank["lm_head.weight"] for rank in ranks]),
        source["language_model.lm_head.weight"],
    )
    for layer in range(config.num_hidden_layers):
        check_attention(config, source, ranks, layer)
        if config.moe_layers[layer]:
            check_moe(config, source, ranks, layer)
        else:
            mlp = f"{LM}.layers.{layer}.mlp"
            check_gated(source, ranks, mlp, f"transformer.layers.{layer}.mlp")


def gemma(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    return (1.0 + values.astype(np.float64)).astype(np.float32)


def check_attention(config: M3Config, source: Any, ranks: Any, layer: int) -> None:
    prefix, to = f"{LM}.layers.{layer}", f"transformer.layers.{layer}"
    sparse, head, index = config.sparse_layers[layer], config.head_size, config.sparse_attention
    pairs = [("self_attn.q_norm", "attention.q_layernorm")]
    pairs += [("self_attn.k_norm", "attention.k_layernorm"), ("input_layernorm",) * 2]
    pairs += [("post_attention_layernorm", "post_layernorm")]
    if sparse:
        pairs += [("self_attn.index_q_norm", "attention.index_q_layernorm")]
        pairs += [("self_attn.index_k_norm", "attention.index_k_layernorm")]
    q, tp_size = config.num_attention_heads * head // config.tp_size, config.tp_size
    for r, rank in enumerate(ranks):
        for name, target in pairs:
            assert_same(rank[f"{to}.{target}.weight"], gemma(source[f"{prefix}.{name}.weight"]))
        # The KV heads of a rank: consecutive ones, or one that several ranks share.
        kv = range(r * config.num_key_value_heads // tp_size, config.num_key_value_heads)
        kv = kv[: config.local_num_key_value_heads]
        sizes = [q, len(kv) * head, len(kv) * head]
        if sparse:
            sizes += [len(kv) * index.index_head_size, index.index_head_size]
        parts = split(rank[f"{to}.attention.qkv.weight"], *sizes)
        names = ["q", "k", "v", "index_q", "index_k"][: len(parts)]
        for name, part in zip(names, parts, strict=True):
            whole = source[f"{prefix}.self_attn.{name}_proj.weight"]
            size = {"index_q": index.index_head_size}.get(name, head)
            rows = {
                "q": slice(r * q, (r + 1) * q),
                "index_k": slice(None),
            }.get(name, slice(kv[0] * size, (kv[-1] + 1) * size))
            assert_same(part, whole[rows])
        assert_same(
            rank[f"{to}.attention.dense.weight"],
            source[f"{prefix}.self_attn.o_proj.weight"][:, r * q : (r + 1) * q],
        )


def check_gated(source: Any, ranks: Any, prefix: str, to: str) -> None:
    """Gate and up are each cut on their own, then stacked."""
    gates, ups = zip(*(np.split(rank[f"{to}.fc.weight"], 2) for rank in ranks), strict=True)
    assert_same(np.concatenate(gates), source[f"{prefix}.gate_proj.weight"])
    assert_same(np.concatenate(ups), source[f"{prefix}.up_proj.weight"])
    assert_same(
        np.concatenate([rank[f"{to}.proj.weight"] for rank in ranks], axis=1),
        source[f"{prefix}.down_proj.weight"],
    )


def check_moe(config: M3Config, source: Any, ranks: Any, layer: int) -> None:
    prefix, to = f"{LM}.layers.{layer}.block_sparse_moe", f"transformer.layers.{layer}.mlp"
    for rank in ranks:
        assert_same(rank[f"{to}.router.weight"], source[f"{prefix}.gate.weight"])
        assert_same(
            rank[f"{to}.router.e_score_correction_bias"],
            source[f"{prefix}.e_score_correction_bias"],
        )
    check_gated(source, ranks, f"{prefix}.shared_experts", f"{to}.shared_expert")
    for expert in range(config.moe.num_experts):
        halves = [np.split(rank[f"{to}.fc.weight"][expert], 2) for rank in ranks]
        for name, half in (("w1", 0), ("w3", 1)):
            assert_same(
                np.concatenate([pair[half] for pair in halves]),
                source[f"{prefix}.experts.{expert}.{name}.weight"],
            )
        assert_same(
            np.concatenate([rank[f"{to}.proj.weight"][expert] for rank in ranks], axis=1),
            source[f"{prefix}.experts.{expert}.w2.weight"],
        )


def test_small_slices_and_expert_parts_change_nothing(
    tiny: Callable[..., Path],
    convert: Callable[..., Any],
    load_tensors: Callable[[Path], dict[str, npt.NDArray[Any]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Slices of a few rows (the last one shorter) and stacks in 2 parts hold the same values."""
    assert convert(tiny(), "--tp_size", "2", output=tmp_path / "whole").code == 0
    monkeypatch.setattr("m3trt.convert.checkpoint.SLICE_ELEMENTS", 200)
    monkeypatch.setattr("m3trt.convert.configuration.MAX_TENSOR_ELEMENTS", 128 * 128 - 1)
    monkeypatch.setattr("m3trt.convert.layout.MAX_TENSOR_ELEMENTS", 1024 * 64)
    assert convert(tiny(), "--tp_size", "2", output=tmp_path / "parts").code == 0
    for rank in ("rank0", "rank1"):
        whole = load_tensors(tmp_path / "whole" / f"{rank}.safetensors")
        parts = load_tensors(tmp_path / "parts" / f"{rank}.safetensors")
        stacks = [name for name in parts if ".part1." in name]
        assert len(stacks) == 6, "3 MoE layers with fc and proj"
        for name in stacks:
            pair = [parts.pop(name.replace(".part1.", f".part{i}.")) for i in (0, 1)]
            parts[name.replace(".part1.", ".")] = np.concatenate(pair)
        assert parts.keys() == whole.keys()
        for name, values in whole.items():
            assert_same(parts[name], values)


def test_vision(
    tiny: Callable[..., Path],
    convert: Callable[..., Any],
    load_tensors: Callable[[Path], dict[str, npt.NDArray[Any]]],
    tmp_path: Path,
) -> None:
    convert(tiny(), "--tp_size", "2")
    source, vision = load_tensors(tiny()), load_tensors(tmp_path / "output" / "vision.safetensors")
    tower, dtype = "vision_tower.vision_model", vision["vision.merger.fc.weight"].dtype
    patch = source[f"{tower}.embeddings.patch_embedding.weight"]
    assert_same(
        vision["vision.patch_embedding.weight"], patch.reshape(len(patch), -1).astype(dtype)
    )
    for kind in ("weight", "bias"):
        layer = f"{tower}.encoder.layers.1"
        assert_same(
            vision[f"vision.layers.1.attention.qkv.{kind}"],
            np.concatenate([source[f"{layer}.self_attn.{x}_proj.{kind}"] for x in "qkv"]),
        )
        for name, target in (
            ("multi_modal_projector.linear_2", "vision.projector.proj"),
            ("patch_merge_mlp.linear_1", "vision.merger.fc"),
            (f"{layer}.mlp.fc1", "vision.layers.1.mlp.fc"),
            (f"{layer}.self_attn.out_proj", "vision.layers.1.attention.dense"),
        ):
            assert_same(vision[f"{target}.{kind}"], source[f"{name}.{kind}"])
        for name, target in (("pre_layrnorm", "pre_layernorm"),):
            assert_same(
                vision[f"vision.{target}.{kind}"],
                source[f"{tower}.{name}.{kind}"].astype(np.float32),
            )
