"""The model configuration that every stage shares.

`convert` reads it from a Hugging Face `config.json` (`hf_config.py`) and stores it as the
checkpoint's `config.json`; `build`, `runtime` and `preprocess` read it back from there. Keys that
TensorRT-LLM users know (`num_attention_heads`, `mapping`, `quantization`, ...) keep their names.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

WEIGHT_LAYOUT = 1
"""Version of the tensor names and layouts in `rank{N}.safetensors`; raised on any change."""

MAX_TENSOR_ELEMENTS = 2**31 - 1
"""TensorRT silently miscomputes on bindings of 2**31 elements or more, so none may exist."""

MAX_FLOAT = 3.4e38
"""What fp32 holds."""


MAX_LAYERS, MAX_EXPERTS = 1024, 4096
"""Far above any model; a config that asks for more would only fill the memory with its plans."""


class ConfigError(ValueError):
    """A configuration value is missing, unknown or contradicts another one."""


def check_number(name: str, found: Any, kind: type[int] | type[float], allow_zero: bool) -> None:
    """Refuse anything but a positive number of type `kind` that an engine's int32 or fp32 holds.

    Raises:
        ConfigError: says what `name` is and what was expected.
    """
    shown = f"{name} is {found!r:.60}"
    accepted = (int,) if kind is int else (int, float)
    if isinstance(found, bool) or not isinstance(found, accepted) or found != found:
        raise ConfigError(f"{shown}, expected {kind.__name__}")
    if found < 0 or (found == 0 and not allow_zero):
        raise ConfigError(f"{shown}, expected {'at least 0' if allow_zero else 'more than 0'}")
    largest = MAX_TENSOR_ELEMENTS if kind is int else MAX_FLOAT
    if found > largest:
        raise ConfigError(f"{shown}, expected {kind.__name__} up to {largest}")


@dataclass(frozen=True, slots=True)
class SparseAttentionConfig:
    """MiniMax Sparse Attention: which earlier blocks a query attends to."""

    num_index_heads: int
    index_head_size: int
    block_size: int
    top_k: int
    init_blocks: int
    local_blocks: int


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Routed experts plus one always-on shared expert."""

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int
    routed_scaling_factor: float


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """CLIP-style tower with 3-D rotary positions, projector and 2x2 patch merger."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    num_channels: int
    temporal_patch_size: int
    spatial_merge_size: int
    segment_max_frames: int
    rotary_base: float
    norm_epsilon: float
    projector_hidden_size: int

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def patch_width(self) -> int:
        """Elements of one flattened patch row (C * T * patch * patch)."""
        return self.num_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True, slots=True)
class M3Config:
    """Everything about a MiniMax-M3 checkpoint that is not a weight.

    Sizes are those of the whole model; `local_*` are those of one of `tp_size` ranks.
    """

    architecture: str
    dtype: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    intermediate_size: int
    hidden_act: str
    swiglu_alpha: float
    swiglu_limit: float
    norm_epsilon: float
    max_position_embeddings: int
    rotary_dim: int
    rotary_base: float
    sparse_layers: tuple[bool, ...]
    moe_layers: tuple[bool, ...]
    sparse_attention: SparseAttentionConfig
    moe: MoeConfig
    vision: VisionConfig | None
    image_token_id: int
    video_token_id: int
    bos_token_id: int
    eos_token_id: int
    tp_size: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float32"):
            raise ConfigError(f"dtype is {self.dtype!r}, expected 'bfloat16' or 'float32'")
        for name in ("sparse_layers", "moe_layers"):
            found = len(getattr(self, name))
            if found != self.num_hidden_layers:
                raise ConfigError(
                    f"{name} has {found} entries, expected num_hidden_layers"
                    f" = {self.num_hidden_layers}"
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of"
                f" num_key_value_heads {self.num_key_value_heads}"
            )
        if self.sparse_attention.num_index_heads != self.num_key_value_heads:
            raise ConfigError(
                f"{self.sparse_attention.num_index_heads} index heads, expected one per KV head"
                f" = {self.num_key_value_heads}: each KV group needs its own selection"
            )
        self._check_ranges()
        self._check_tp()

    def _check_ranges(self) -> None:
        sparse, moe, vision = self.sparse_attention, self.moe, self.vision
        for name, count, most in (
            ("num_hidden_layers", self.num_hidden_layers, MAX_LAYERS),
            ("vision.num_hidden_layers", vision.num_hidden_layers if vision else 0, MAX_LAYERS),
            ("moe.num_experts", moe.num_experts, MAX_EXPERTS),
        ):
            if count > most:
                raise ConfigError(f"{name} is {count}, expected at most {most}")
        narrowest = min(self.head_size, sparse.index_head_size)
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= narrowest:
            raise ConfigError(
                f"rotary_dim is {self.rotary_dim}, expected an even number up to {narrowest}, the"
                " smaller of head_size and index_head_size"
            )
        if sparse.local_blocks < 1 or sparse.init_blocks + sparse.local_blocks > sparse.top_k:
            raise ConfigError(
                f"{sparse.init_blocks} init and {sparse.local_blocks} local blocks, expected at"
                f" least 1 local block and together at most top_k = {sparse.top_k}"
            )
        if moe.top_k > moe.num_experts:
            raise ConfigError(f"moe.top_k is {moe.top_k}, expected at most {moe.num_experts}")
        if vision and (vision.hidden_size % vision.num_attention_heads or vision.head_size < 6):
            raise ConfigError(
                f"vision.hidden_size {vision.hidden_size} over {vision.num_attention_heads} heads:"
                " expected a whole head size of at least 6, one rotary pair for each of 3 axes"
            )

    def _check_tp(self) -> None:
        tp = self.tp_size
        split = {
            "num_attention_heads": self.num_attention_heads,
            "intermediate_size": self.intermediate_size,
            "moe.intermediate_size": self.moe.intermediate_size,
            "moe.shared_intermediate_size": self.moe.shared_intermediate_size,
            "vocab_size": self.vocab_size,
        }
        for name, size in split.items():
            if tp < 1 or size % tp:
                raise ConfigError(f"tp_size {tp} does not divide {name} = {size}")
        kv = self.num_key_value_heads
        if max(kv, tp) % min(kv, tp):
            raise ConfigError(f"tp_size {tp} and num_key_value_heads {kv} do not divide each other")

    # ---- sizes of one rank ----------------------------------------------------------------

    @property
    def local_num_attention_heads(self) -> int:
        return self.num_attention_heads // self.tp_size

    @property
    def local_num_key_value_heads(self) -> int:
        """KV heads of one rank; also its index query heads. At least one: pairs are replicated."""
        return max(1, self.num_key_value_heads // self.tp_size)

    @property
    def local_vocab_size(self) -> int:
        return self.vocab_size // self.tp_size

    @property
    def tokens_per_block(self) -> int:
        """Tokens of one cache page; MSA needs page = block."""
        return self.sparse_attention.block_size

    @property
    def expert_parts(self) -> int:
        """Into how many tensors an expert stack is cut: each has fewer than 2**31 elements."""
        rows = self.moe.num_experts * 2 * self.moe.intermediate_size // self.tp_size
        parts = 1
        while rows * self.hidden_size // parts > MAX_TENSOR_ELEMENTS:
            parts *= 2
        if self.moe.num_experts % parts:
            raise ConfigError(f"{self.moe.num_experts} experts cannot be cut into {parts} parts")
        return parts

    # ---- files ----------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The checkpoint's `config.json`, with TensorRT-LLM's mandatory keys."""
        fields = dataclasses.asdict(self)
        tp_size = fields.pop("tp_size")
        return {
            "weight_layout": WEIGHT_LAYOUT,
            **fields,
            "logits_dtype": "float32",
            "position_embedding_type": "rope_gpt_neox",
            "mapping": {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1},
            "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        }

    @classmethod
    def from_json(cls, data: Any) -> M3Config:
        """Read `to_json`'s form.

        Raises:
            ConfigError: the weight layout differs, or a key is missing or unknown.
        """
        if not isinstance(data, dict):
            raise ConfigError(
                f"expected an object with the model configuration, found {data!r:.80}"
            )
        data = dict(data)
        layout = data.pop("weight_layout", None)
        if layout != WEIGHT_LAYOUT:
            raise ConfigError(
                f"checkpoint has weight_layout {layout}, this version reads {WEIGHT_LAYOUT}:"
                " convert the checkpoint again"
            )
        for derived in ("logits_dtype", "position_embedding_type", "quantization"):
            data.pop(derived, None)
        mapping = data.pop("mapping", None)
        if not isinstance(mapping, dict) or not isinstance(mapping.get("tp_size"), int):
            raise ConfigError(f"mapping is {mapping!r}, expected an object with an integer tp_size")
        data["tp_size"] = mapping["tp_size"]
        for key in ("sparse_layers", "moe_layers"):
            flags = data.get(key)
            if not isinstance(flags, list) or not all(isinstance(flag, bool) for flag in flags):
                raise ConfigError(
                    f"{key} is {flags!r:.80}, expected a list with true or false for each layer"
                )
            data[key] = tuple(flags)
        data["sparse_attention"] = _strict(SparseAttentionConfig, data.get("sparse_attention"))
        data["moe"] = _strict(MoeConfig, data.get("moe"))
        if data.get("vision") is not None:
            data["vision"] = _strict(VisionConfig, data["vision"])
        return _strict(cls, data)

    @classmethod
    def load(cls, checkpoint_dir: Path) -> M3Config:
        """Read `checkpoint_dir/config.json`."""
        path = checkpoint_dir / "config.json"
        try:
            return cls.from_json(json.loads(path.read_text()))
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(
                f"{path} does not exist: expected a directory written by m3trt.convert"
            ) from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: {error}") from error


_T = TypeVar("_T")


def _strict(cls: type[_T], data: Any) -> _T:
    """Build dataclass `cls` from a dict; missing, unknown and mistyped keys are errors."""
    if not isinstance(data, dict):
        raise ConfigError(f"expected an object for {cls.__name__}, found {data!r}")
    types = {f.name: f.type for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown, missing = sorted(data.keys() - types.keys()), sorted(types.keys() - data.keys())
    if unknown or missing:
        raise ConfigError(f"{cls.__name__}: unknown keys {unknown}, missing keys {missing}")
    for name, kind in types.items():
        if kind in ("int", "float"):
            zero = name.endswith("_token_id") or name == "init_blocks"
            check_number(
                f"{cls.__name__}: {name}", data[name], int if kind == "int" else float, zero
            )
        elif kind == "str" and not isinstance(data[name], str):
            raise ConfigError(f"{cls.__name__}: {name} is {data[name]!r:.60}, expected a string")
    return cls(**data)
