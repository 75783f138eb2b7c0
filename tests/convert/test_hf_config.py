"""Three spellings of a config, and every trap in them."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from m3trt.convert.configuration import ConfigError, M3Config
from m3trt.convert.hf_config import load_source, parse_config
from m3trt.convert.plan import layout_files
from m3trt.convert.tiny_config import tiny_config

pytestmark = pytest.mark.smoke

FLAT = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}


def saved_by_transformers(released: dict[str, Any]) -> dict[str, Any]:
    """What `save_pretrained` makes of a released config."""
    data = copy.deepcopy(released)
    data["dtype"] = data.pop("torch_dtype")
    text, vision = data["text_config"], data["vision_config"]
    sparse = text.pop("sparse_attention_config")
    text |= {flat: sparse[nested] for flat, nested in FLAT.items()}
    text["layer_types"] = [
        "minimax_m3_sparse" if x else "full_attention" for x in sparse["sparse_attention_freq"]
    ]
    text["mlp_layer_types"] = ["sparse" if x else "dense" for x in text.pop("moe_layer_freq")]
    text["rope_parameters"] = {
        "rope_theta": text.pop("rope_theta"),
        "partial_rotary_factor": text.pop("partial_rotary_factor"),
        "rope_type": "default",
    }
    text |= {"hidden_act": "silu", "model_type": "minimax_m3_vl_text"}
    vision["model_type"] = "minimax_m3_vl_vision"
    vision["rope_parameters"] = {"rope_theta": vision.pop("rope_theta"), "rope_type": "axial"}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
    data["merged_hidden_size"] = 4 * text["hidden_size"]
    return data


def derived_by_adapters(released: dict[str, Any]) -> dict[str, Any]:
    """Both forms at once: the nested object rebuilt beside the flat keys."""
    data = saved_by_transformers(released)
    text = data["text_config"]
    text["sparse_attention_config"] = {
        "use_sparse_attention": True,
        "sparse_attention_freq": released["text_config"]["sparse_attention_config"][
            "sparse_attention_freq"
        ],
        **{nested: text[flat] for flat, nested in FLAT.items()},
    }
    text |= {"hidden_act": "swigluoai", "rope_theta": 5000000}
    return data


@pytest.mark.parametrize("spell", [saved_by_transformers, derived_by_adapters])
def test_spellings_give_equal_configs(
    released: dict[str, Any], spell: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    assert parse_config(spell(released), {}) == parse_config(released, {})


def test_released_values(released: dict[str, Any]) -> None:
    config = parse_config(released, {}, tp_size=8)
    assert config.sparse_layers == config.moe_layers == (False,) * 3 + (True,) * 57
    assert (config.dtype, config.max_position_embeddings) == ("bfloat16", 1048576)
    assert (config.rotary_dim, config.rotary_base) == (64, 5e6)
    assert (config.bos_token_id, config.eos_token_id) == (200034, 200020)
    assert config.sparse_attention.init_blocks == 0
    assert config.vision is not None
    assert (config.vision.segment_max_frames, config.vision.patch_width) == (4, 1176)
    assert (config.local_num_attention_heads, config.local_num_key_value_heads) == (8, 1)
    assert M3Config.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.full
def test_transformers_really_saves_that_spelling(tmp_path: Path) -> None:
    """Its own class reads our released spelling, writes the other one, and both mean the same."""
    import transformers

    data = tiny_config("small")
    transformers.CONFIG_MAPPING["minimax_m3_vl"](**copy.deepcopy(data)).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "sparse_attention_config" not in written["text_config"]
    written["architectures"] = data["architectures"]
    assert parse_config(written, {}) == parse_config(data, {})


def test_values_come_from_the_file(released: dict[str, Any]) -> None:
    text = released["text_config"]
    text |= {"num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "swiglu_limit": 9.0}
    text["sparse_attention_config"] |= {"sparse_init_block": 2, "sparse_topk_blocks": 32}
    config = parse_config(released, {"eos_token_id": [7, 8]})
    assert (config.moe.top_k, config.moe.routed_scaling_factor) == (8, 2.5)
    assert (config.sparse_attention.init_blocks, config.sparse_attention.top_k) == (2, 32)
    assert (config.swiglu_limit, config.eos_token_id) == (9.0, 7)


def test_text_only(released: dict[str, Any]) -> None:
    del released["vision_config"]
    assert parse_config(released, {}).vision is None


REMOVED = object()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_type", "llama", "model_type is 'llama', expected one of ['minimax_m3_vl']"),
        ("text_config", REMOVED, "text_config is None"),
        ("architectures", [], "architectures is []"),
        ("torch_dtype", REMOVED, "torch_dtype or dtype"),
        ("torch_dtype", "float16", "choose --dtype bfloat16"),
        ("dtype", "float32", "dtype is 'float32', expected 'bfloat16' as in torch_dtype"),
        ("tie_word_embeddings", True, "tie_word_embeddings is True, which is not supported"),
        ("text_config.attention_output_gate", True, "attention_output_gate is True"),
        ("text_config.use_gemma_norm", False, "use_gemma_norm is False"),
        ("text_config.qk_norm_type", "per_layer", "'per_layer', which is not supported"),
        ("text_config.scoring_func", "softmax", "'softmax', which is not supported"),
        ("text_config.n_shared_experts", 2, "n_shared_experts is 2"),
        ("text_config.hidden_act", "silu", "hidden_act is 'silu'"),
        ("text_config.hidden_act", REMOVED, "hidden_act is None"),
        ("text_config.rope_scaling", {"type": "yarn", "factor": 4.0}, "rope_scaling.type is"),
        ("text_config.rope_scaling", {"type": "default", "factor": 4.0}, "has ['factor']"),
        ("text_config.rotary_dim", 128, "rotary_dim is 128, expected head_dim 128 *"),
        ("text_config.partial_rotary_factor", 0.3, "rotary_dim is 64, expected head_dim"),
        ("text_config.rope_theta", REMOVED, "rope_theta or text_config.rope_parameters"),
        ("text_config.swiglu_alpha", REMOVED, "text_config.swiglu_alpha is missing"),
        ("text_config.hidden_size", "6144", "hidden_size is '6144', expected int"),
        ("text_config.hidden_size", True, "hidden_size is True, expected int"),
        ("text_config.num_local_experts", 0, "num_local_experts is 0, expected more than 0"),
        ("text_config.rms_norm_eps", float("nan"), "rms_norm_eps is nan"),
        ("text_config.rope_theta", 10**400, "expected float up to 3.4e+38"),
        ("text_config.hidden_size", 2**31, "is 2147483648, expected int up to 2147483647"),
        ("text_config.num_local_experts", 10**6, "num_experts is 1000000, expected at most 4096"),
        ("vision_config.num_hidden_layers", 10**9, "vision.num_hidden_layers is 1000000000"),
        ("text_config.moe_layer_freq", [0, 1], "has 2 entries, expected one for each of 60"),
        ("text_config.moe_layer_freq", 1, "moe_layer_freq has 1, expected"),
        ("text_config.moe_layer_freq", [2] * 60, "moe_layer_freq[0] is 2"),
        ("text_config.moe_layer_freq", REMOVED, "moe_layer_freq or text_config.mlp_layer_types"),
        ("text_config.mlp_layer_types", ["sparse"] * 60, "mlp_layer_types[0] contradicts"),
        ("text_config.layer_types", ["full_attention"] * 60, "layer_types[3] contradicts"),
        ("text_config.sparse_attention_config", REMOVED, "silently run with full attention"),
        ("text_config.index_n_heads", 8, "index_n_heads is 8, expected 4 as in"),
        ("sparse.use_sparse_attention", False, "use_sparse_attention is False"),
        ("sparse.sparse_score_type", "mean", "sparse_score_type is 'mean'"),
        ("sparse.sparse_disable_index_value", [0] * 60, "disable_index_value[3] is 0"),
        ("sparse.sparse_num_index_heads", 2, "2 index heads, expected one per KV head = 4"),
        ("sparse.sparse_topk_blocks", REMOVED, "sparse_topk_blocks or"),
        ("sparse.sparse_init_block", 16, "16 init and 1 local blocks"),
        ("vision_config.hidden_act", "quick_gelu", "hidden_act is 'quick_gelu'"),
        ("vision_config.rope_mode", "2d", "rope_mode is '2d'"),
        ("vision_config.spatial_merge_size", 4, "spatial_merge_size is 4, expected 2"),
        ("vision_config.projection_dim", 64, "projection_dim is 64, expected 6144"),
        ("vision_config.vision_segment_max_frames", REMOVED, "vision_segment_max_frames is mis"),
        ("vision_feature_layer", -2, "vision_feature_layer is -2"),
        ("image_token_index", 200064, "image_token_id is 200064, expected an id below"),
        ("text_config.eos_token_id", "x", "eos_token_id is 'x', expected int"),
        ("text_config.eos_token_id", [1, "x"], "eos_token_id is 'x', expected int"),
        ("text_config.eos_token_id", [], "eos_token_id is [], expected int"),
        ("text_config.vocab_size", 200063, "tp_size 2 does not divide vocab_size"),
    ],
)
def test_refuses(released: dict[str, Any], key: str, value: Any, message: str) -> None:
    """The message names the key, what was found and what was expected."""
    *path, name = key.replace("sparse.", "text_config.sparse_attention_config.").split(".")
    section = released
    for part in path:
        section = section[part]
    if value is REMOVED:
        del section[name]
    else:
        section[name] = value
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_config(released, {}, tp_size=2)


WRONG = (None, "8", True, -1, 0, 1.5, 2**40, 10**400, float("inf"), 1e300, [], [[1]], {"a": 1})


def settings(section: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    for name, value in list(section.items()):
        yield section, name
        if isinstance(value, dict):
            yield from settings(value)


@pytest.mark.parametrize("checkpoint", [False, True], ids=["source", "checkpoint"])
def test_no_value_escapes_as_another_error(checkpoint: bool) -> None:
    """Whatever stands where: a ConfigError, or a model whose tensors can be listed."""
    data = tiny_config("small")
    if checkpoint:
        data = parse_config(data, {}).to_json()
    refused = 0
    for section, name in settings(data):
        right = section[name]
        for value in WRONG:
            section[name] = value
            try:
                layout_files(M3Config.from_json(data) if checkpoint else parse_config(data, {}))
            except ConfigError:
                refused += 1
        section[name] = right
    assert refused > 300


@pytest.mark.parametrize("tp_size", [3, 128])
def test_refuses_rank_counts_that_do_not_divide(released: dict[str, Any], tp_size: int) -> None:
    with pytest.raises(ConfigError, match=f"tp_size {tp_size} does not divide"):
        parse_config(released, {}, tp_size=tp_size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "nvfp4"}, "quant_method is 'nvfp4', which is not supported"),
        ({"weight_block_size": [128, 128]}, "weight_block_size is [128, 128], expected [1, 32]"),
        ({"ignored_layers": None}, "ignored_layers is None, expected a list"),
    ],
)
def test_refuses_other_quantisation(
    released: dict[str, Any], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    mxfp8 = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "ignored_layers": ["lm_head"]}
    released["quantization_config"] = mxfp8 | change
    (tmp_path / "config.json").write_text(json.dumps(released))
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_source(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON"),
        (b"[]", "holds a list"),
    ],
)
def test_unreadable_file(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_source(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_layout": 99}, "weight_layout 99, this version reads 1"),
        ({"surprise": 1}, "unknown keys ['surprise']"),
        ({"moe": {}}, "MoeConfig: unknown keys [], missing keys"),
        ({"vision": 3}, "expected an object for VisionConfig"),
        ({"num_attention_heads": "64"}, "num_attention_heads is '64', expected int"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0, expected more than 0"),
        ({"norm_epsilon": math.nan}, "norm_epsilon is nan, expected float"),
        ({"hidden_act": 1}, "hidden_act is 1, expected a string"),
        ({"moe_layers": ["false"] * 60}, "expected a list with true or false for each layer"),
    ],
)
def test_checkpoint_config_is_strict(
    released: dict[str, Any], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    data = parse_config(released, {}).to_json() | change
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=re.escape(message)):
        M3Config.load(tmp_path)
