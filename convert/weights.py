"""Weight rules of MiniMax-M3: which source tensor becomes which part of which target.

Rules with one target are stacked along its first axis in the order of the table (for experts:
expert by expert). Sizes are symbols, resolved by `dimensions`. A native MXFP8 layout will add rules
whose sources are the scales.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from m3trt.convert.configuration import M3Config


class Shard(Enum):
    """How a source is cut for tensor parallelism."""

    REPLICATED = "whole on every rank"
    ROWS = "rank r takes rows r*n/T.."
    COLUMNS = "rank r takes columns r*n/T.."
    KV_ROWS = "rank r takes the rows of KV head r*heads//T.., so heads repeat when T > heads"


class Transform(Enum):
    """What happens to the values beyond the change of dtype."""

    CAST = "nothing"
    GEMMA = "1 + w, in fp32"


class Where(Enum):
    """The layers that have the tensor; ONCE means that the names hold no `{layer}`."""

    ONCE = "not in a layer"
    ALL = "every text layer"
    SPARSE = "text layers with sparse attention"
    DENSE_MLP = "text layers with a dense MLP"
    MOE = "text layers with experts"
    VISION = "every vision layer"


class Rule(NamedTuple):
    """One row: names may hold `{layer}` and `{expert}`; `linear` weights may be quantised."""

    source: str
    target: str
    shape: str
    where: Where
    shard: Shard = Shard.REPLICATED
    transform: Transform = Transform.CAST
    linear: bool = False


def dimensions(config: M3Config) -> dict[str, int]:
    """The sizes that the shapes of the rules name."""
    head, index = config.head_size, config.sparse_attention
    sizes = {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "q": config.num_attention_heads * head,
        "kv": config.num_key_value_heads * head,
        "head": head,
        "index_q": index.num_index_heads * index.index_head_size,
        "index": index.index_head_size,
        "dense": config.intermediate_size,
        "experts": config.moe.num_experts,
        "expert": config.moe.intermediate_size,
        "shared": config.moe.shared_intermediate_size,
    }
    if vision := config.vision:
        sizes |= {
            "v_hidden": vision.hidden_size,
            "v_mlp": vision.intermediate_size,
            "channels": vision.num_channels,
            "frames": vision.temporal_patch_size,
            "patch": vision.patch_size,
            "projector": vision.projector_hidden_size,
            "merged": config.hidden_size * vision.spatial_merge_size**2,
        }
    return sizes


def _linear(source: str, target: str, shape: str, where: Where, shard: Shard) -> Rule:
    return Rule(source, target, shape, where, shard, linear=True)


def _norm(source: str, target: str, shape: str, where: Where) -> Rule:
    return Rule(source, target, shape, where, transform=Transform.GEMMA)


_LAYER = "language_model.model.layers.{layer}"
_ATTENTION, _MOE = f"{_LAYER}.self_attn", f"{_LAYER}.block_sparse_moe"
_MLP, _EXPERT, _SHARED = f"{_LAYER}.mlp", f"{_MOE}.experts.{{expert}}", f"{_MOE}.shared_experts"
_TO = "transformer.layers.{layer}"
_QKV, _SHARED_TO = f"{_TO}.attention.qkv.weight", f"{_TO}.mlp.shared_expert"

TEXT_RULES = (
    Rule(
        "language_model.model.embed_tokens.weight",
        "transformer.vocab_embedding.weight",
        "vocab hidden",
        Where.ONCE,
    ),
    Rule("language_model.lm_head.weight", "lm_head.weight", "vocab hidden", Where.ONCE, Shard.ROWS),
    _norm("language_model.model.norm.weight", "transformer.ln_f.weight", "hidden", Where.ONCE),
    _norm(f"{_LAYER}.input_layernorm.weight", f"{_TO}.input_layernorm.weight", "hidden", Where.ALL),
    _linear(f"{_ATTENTION}.q_proj.weight", _QKV, "q hidden", Where.ALL, Shard.ROWS),
    _linear(f"{_ATTENTION}.k_proj.weight", _QKV, "kv hidden", Where.ALL, Shard.KV_ROWS),
    _linear(f"{_ATTENTION}.v_proj.weight", _QKV, "kv hidden", Where.ALL, Shard.KV_ROWS),
    _linear(
        f"{_ATTENTION}.index_q_proj.weight", _QKV, "index_q hidden", Where.SPARSE, Shard.KV_ROWS
    ),
    _linear(
        f"{_ATTENTION}.index_k_proj.weight", _QKV, "index hidden", Where.SPARSE, Shard.REPLICATED
    ),
    _linear(
        f"{_ATTENTION}.o_proj.weight",
        f"{_TO}.attention.dense.weight",
        "hidden q",
        Where.ALL,
        Shard.COLUMNS,
    ),
    *(
        _norm(
            f"{_ATTENTION}.{name}_norm.weight",
            f"{_TO}.attention.{name}_layernorm.weight",
            size,
            where,
        )
        for name, size, where in (
            ("q", "head", Where.ALL),
            ("k", "head", Where.ALL),
            ("index_q", "index", Where.SPARSE),
            ("index_k", "index", Where.SPARSE),
        )
    ),
    _norm(
        f"{_LAYER}.post_attention_layernorm.weight",
        f"{_TO}.post_layernorm.weight",
        "hidden",
        Where.ALL,
    ),
    Rule(f"{_MOE}.gate.weight", f"{_TO}.mlp.router.weight", "experts hidden", Where.MOE),
    Rule(
        f"{_MOE}.e_score_correction_bias",
        f"{_TO}.mlp.router.e_score_correction_bias",
        "experts",
        Where.MOE,
    ),
    *(
        _linear(f"{source}.{name}.weight", f"{target}.{into}.weight", shape, where, shard)
        for source, target, width, where, names in (
            (_MLP, f"{_TO}.mlp", "dense", Where.DENSE_MLP, ("gate_proj", "up_proj", "down_proj")),
            (_EXPERT, f"{_TO}.mlp", "expert", Where.MOE, ("w1", "w3", "w2")),
            (_SHARED, _SHARED_TO, "shared", Where.MOE, ("gate_proj", "up_proj", "down_proj")),
        )
        for name, into, shape, shard in (
            (names[0], "fc", f"{width} hidden", Shard.ROWS),
            (names[1], "fc", f"{width} hidden", Shard.ROWS),
            (names[2], "proj", f"hidden {width}", Shard.COLUMNS),
        )
    ),
)


def _affine(source: str, target: str, shape: str, where: Where) -> tuple[Rule, Rule]:
    return (
        Rule(f"{source}.weight", f"{target}.weight", shape, where),
        Rule(f"{source}.bias", f"{target}.bias", shape.split()[0], where),
    )


_TOWER = "vision_tower.vision_model"
_BLOCK, _BLOCK_TO = f"{_TOWER}.encoder.layers.{{layer}}", "vision.layers.{layer}"

VISION_RULES = (
    Rule(
        f"{_TOWER}.embeddings.patch_embedding.weight",
        "vision.patch_embedding.weight",
        "v_hidden channels frames patch patch",
        Where.ONCE,
    ),
    *_affine(f"{_TOWER}.pre_layrnorm", "vision.pre_layernorm", "v_hidden", Where.ONCE),
    *(
        rule
        for source, target, shape in (
            ("layer_norm1", "layernorm1", "v_hidden"),
            ("self_attn.q_proj", "attention.qkv", "v_hidden v_hidden"),
            ("self_attn.k_proj", "attention.qkv", "v_hidden v_hidden"),
            ("self_attn.v_proj", "attention.qkv", "v_hidden v_hidden"),
            ("self_attn.out_proj", "attention.dense", "v_hidden v_hidden"),
            ("layer_norm2", "layernorm2", "v_hidden"),
            ("mlp.fc1", "mlp.fc", "v_mlp v_hidden"),
            ("mlp.fc2", "mlp.proj", "v_hidden v_mlp"),
        )
        for rule in _affine(f"{_BLOCK}.{source}", f"{_BLOCK_TO}.{target}", shape, Where.VISION)
    ),
    *(
        rule
        for source, target, shape in (
            ("multi_modal_projector.linear_1", "vision.projector.fc", "projector v_hidden"),
            ("multi_modal_projector.linear_2", "vision.projector.proj", "hidden projector"),
            ("patch_merge_mlp.linear_1", "vision.merger.fc", "projector merged"),
            ("patch_merge_mlp.linear_2", "vision.merger.proj", "hidden projector"),
        )
        for rule in _affine(source, target, shape, Where.ONCE)
    ),
)
