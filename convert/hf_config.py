"""Reads a Hugging Face `config.json` of MiniMax-M3 in any of its spellings (`hf_keys.py`).

Every value comes from the file. Where two spellings stand side by side they have to agree.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3trt.convert.configuration import (
    ConfigError,
    M3Config,
    MoeConfig,
    SparseAttentionConfig,
    VisionConfig,
    check_number,
)
from m3trt.convert.hf_keys import (
    DEFAULT_TOKENS,
    MODEL_TYPE,
    MOE_KEYS,
    ROPE_KEYS,
    SPARSE,
    SPARSE_KEYS,
    SUPPORTED,
    TEXT,
    TEXT_KEYS,
    TOKEN_KEYS,
    VISION,
    VISION_KEYS,
    KeyTable,
)


@dataclass(frozen=True, slots=True)
class Mxfp8:
    """MXFP8 storage: e4m3 values with one E8M0 scale per 32 inputs, except `ignored_layers`."""

    ignored_layers: tuple[str, ...]

    def covers(self, tensor: str) -> bool:
        """Whether linear weight `tensor` is stored quantised. Entries match anywhere in a name."""
        return not any(entry in tensor for entry in self.ignored_layers)


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A Hugging Face checkpoint's configuration and how its linear weights are stored."""

    config: M3Config
    quantization: Mxfp8 | None


def load_source(model_dir: Path, dtype: str = "auto", tp_size: int = 1) -> SourceModel:
    """Read `model_dir/config.json` (and the token ids of `generation_config.json`).

    Args:
        dtype: "auto" takes the checkpoint's own dtype.

    Raises:
        ConfigError: a key is missing, contradicts another one or asks for unsupported semantics.
    """
    path = model_dir / "config.json"
    generation = model_dir / "generation_config.json"
    data = _read_object(path)
    tokens = _read_object(generation) if generation.is_file() else {}
    try:
        return SourceModel(parse_config(data, tokens, dtype, tp_size), _quantization(data))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_config(
    data: dict[str, Any], generation: dict[str, Any], dtype: str = "auto", tp_size: int = 1
) -> M3Config:
    """Turn a parsed `config.json` and `generation_config.json` into the shared configuration."""
    if data.get("model_type") != MODEL_TYPE:
        raise ConfigError(
            f"model_type is {data.get('model_type')!r}, expected one of {[MODEL_TYPE]}"
        )
    if not isinstance(data.get(TEXT), dict):
        raise ConfigError(f"{TEXT} is {data.get(TEXT)!r}, expected an object")
    _check_supported(data)
    text = _values(data, TEXT_KEYS)
    layers = text["num_hidden_layers"]
    config = M3Config(
        architecture=_architecture(data),
        dtype=_dtype(data, dtype),
        **text,
        **_values(data, TOKEN_KEYS, allow_zero=True),
        hidden_act=_activation(data),
        rotary_dim=_rotary_dim(data, text["head_size"]),
        sparse_layers=_sparse_layers(data, layers),
        moe_layers=_layer_map(
            data,
            layers,
            (f"{TEXT}.moe_layer_freq", {0: False, 1: True}),
            (f"{TEXT}.mlp_layer_types", {"dense": False, "sparse": True}),
        ),
        sparse_attention=SparseAttentionConfig(
            **_values(data, SPARSE_KEYS), init_blocks=_init_blocks(data)
        ),
        moe=MoeConfig(**_values(data, MOE_KEYS)),
        vision=_vision(data, text["hidden_size"]),
        bos_token_id=_token(data, generation, "bos_token_id"),
        eos_token_id=_token(data, generation, "eos_token_id"),
        tp_size=tp_size,
    )
    for name in ("image_token_id", "video_token_id", "bos_token_id", "eos_token_id"):
        if not 0 <= getattr(config, name) < config.vocab_size:
            raise ConfigError(
                f"{name} is {getattr(config, name)}, expected an id below vocab_size"
                f" = {config.vocab_size}"
            )
    return config


# ---- look-up -------------------------------------------------------------------------------


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path} does not exist: expected a Hugging Face checkpoint") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}, expected an object")
    return data


def _find(data: dict[str, Any], key: str) -> Any:
    """The value under dotted `key`, None where it is absent or null."""
    value: Any = data
    for name in key.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


def _agree(data: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """The value of the keys that are present: at least one, all equal."""
    present = {key: value for key in keys if (value := _find(data, key)) is not None}
    if not present:
        raise ConfigError(f"{' or '.join(keys)} is missing: expected a value")
    first, expected = next(iter(present.items()))
    for key, found in present.items():
        if found != expected:
            raise ConfigError(f"{key} is {found!r}, expected {expected!r} as in {first}")
    return expected


def _number(
    data: dict[str, Any],
    kind: type[int] | type[float],
    keys: tuple[str, ...],
    allow_zero: bool = False,
) -> Any:
    found = _agree(data, keys)
    check_number(" or ".join(keys), found, kind, allow_zero)
    return kind(found)


def _values(data: dict[str, Any], table: KeyTable, allow_zero: bool = False) -> dict[str, Any]:
    return {field: _number(data, kind, keys, allow_zero) for field, (kind, keys) in table.items()}


# ---- semantics -----------------------------------------------------------------------------


def _check_supported(data: dict[str, Any]) -> None:
    for key, supported in SUPPORTED.items():
        found = _find(data, key)
        if found is not None and found not in supported:
            expected = " or ".join(repr(value) for value in supported)
            raise ConfigError(f"{key} is {found!r}, which is not supported: expected {expected}")
    for key in (f"{TEXT}.rope_parameters", f"{TEXT}.rope_scaling", f"{VISION}.rope_parameters"):
        found = _find(data, key)
        unknown = sorted(found.keys() - ROPE_KEYS) if isinstance(found, dict) else found
        if unknown:
            raise ConfigError(f"{key} has {unknown}: scaled rotary positions are not supported")


def _architecture(data: dict[str, Any]) -> str:
    found = data.get("architectures")
    if not isinstance(found, list) or not found or not isinstance(found[0], str):
        raise ConfigError(f"architectures is {found!r}, expected a list with one class name")
    return found[0]


def _dtype(data: dict[str, Any], requested: str) -> str:
    if requested != "auto":
        return requested
    keys = ("torch_dtype", "dtype", f"{TEXT}.torch_dtype", f"{TEXT}.dtype")
    found = str(_agree(data, keys)).removeprefix("torch.")
    if found not in ("bfloat16", "float32"):
        raise ConfigError(
            f"the checkpoint's dtype is {found}, which is not supported: choose --dtype bfloat16"
            " or --dtype float32"
        )
    return found


def _activation(data: dict[str, Any]) -> str:
    """transformers writes "silu" on saving although the model still computes swigluoai."""
    found = _find(data, f"{TEXT}.hidden_act")
    saved_again = _find(data, f"{TEXT}.model_type") == "minimax_m3_vl_text"
    if found != "swigluoai" and not (found == "silu" and saved_again):
        raise ConfigError(
            f"{TEXT}.hidden_act is {found!r}, which is not supported: expected 'swigluoai'"
        )
    return "swigluoai"


def _rotary_dim(data: dict[str, Any], head_size: int) -> int:
    keys = (f"{TEXT}.partial_rotary_factor", f"{TEXT}.rope_parameters.partial_rotary_factor")
    declared = f"{TEXT}.rotary_dim"
    if all(_find(data, key) is None for key in keys):
        return int(_number(data, int, (declared,)))
    factor = _number(data, float, keys)
    expected = head_size * factor
    if _find(data, declared) not in (None, expected):
        raise ConfigError(
            f"{declared} is {_find(data, declared)!r}, expected head_dim {head_size} *"
            f" partial_rotary_factor {factor} = {expected:g}"
        )
    if expected != int(expected):
        raise ConfigError(f"head_dim {head_size} * {factor} = {expected:g} is not a whole number")
    return int(expected)


def _layer_map(
    data: dict[str, Any], layers: int, *spellings: tuple[str, dict[Any, bool]]
) -> tuple[bool, ...]:
    """One flag a layer from whichever of the spellings (key, meaning of its words) are there."""
    found: dict[str, tuple[bool, ...]] = {}
    for key, meaning in spellings:
        words = _find(data, key)
        if words is None:
            continue
        if not isinstance(words, list) or len(words) != layers:
            size = f"{len(words)} entries" if isinstance(words, list) else repr(words)
            raise ConfigError(f"{key} has {size}, expected one for each of {layers} layers")
        for layer, word in enumerate(words):
            if not isinstance(word, (int, str)) or word not in meaning:
                raise ConfigError(
                    f"{key}[{layer}] is {word!r}, expected one of {list(meaning)}: not supported"
                )
        found[key] = tuple(meaning[word] for word in words)
    if not found:
        raise ConfigError(f"{' or '.join(key for key, _ in spellings)} is missing")
    first, expected = next(iter(found.items()))
    for key, flags in found.items():
        for layer, (one, other) in enumerate(zip(flags, expected, strict=True)):
            if one != other:
                raise ConfigError(f"{key}[{layer}] contradicts {first}[{layer}]: expected the same")
    return expected


def _sparse_layers(data: dict[str, Any], layers: int) -> tuple[bool, ...]:
    if all(_find(data, key) is None for _, keys in SPARSE_KEYS.values() for key in keys):
        raise ConfigError(
            f"{SPARSE} is missing: expected it (or {TEXT}.index_*), without it the model would"
            " silently run with full attention"
        )
    sparse = _layer_map(
        data,
        layers,
        (f"{SPARSE}.sparse_attention_freq", {0: False, 1: True}),
        (f"{TEXT}.layer_types", {"full_attention": False, "minimax_m3_sparse": True}),
    )
    key = f"{SPARSE}.sparse_disable_index_value"
    if _find(data, key) is not None:
        disabled = _layer_map(data, layers, (key, {0: False, 1: True}))
        for layer in range(layers):
            if sparse[layer] and not disabled[layer]:
                raise ConfigError(
                    f"{key}[{layer}] is 0: index values on sparse layers are not supported,"
                    " expected 1"
                )
    return sparse


def _init_blocks(data: dict[str, Any]) -> int:
    """Forced first blocks; transformers' own spelling cannot express any."""
    key = f"{SPARSE}.sparse_init_block"
    return 0 if _find(data, key) is None else int(_number(data, int, (key,), allow_zero=True))


def _vision(data: dict[str, Any], text_hidden_size: int) -> VisionConfig | None:
    if data.get(VISION) is None:
        return None
    vision = VisionConfig(**_values(data, VISION_KEYS))
    merged = text_hidden_size * vision.spatial_merge_size**2
    for key, expected in (
        (f"{VISION}.projection_dim", text_hidden_size),
        ("merged_hidden_size", merged),
    ):
        if _find(data, key) not in (None, expected):
            raise ConfigError(f"{key} is {_find(data, key)!r}, expected {expected}")
    return vision


def _token(data: dict[str, Any], generation: dict[str, Any], name: str) -> int:
    for where in (data.get(TEXT, {}), data, generation):
        found = where.get(name)
        if found is None:
            continue
        # The first of several ends a turn; all of them stay in generation_config.json.
        ids = found if isinstance(found, list) and found else [found]
        for each in ids:
            check_number(name, each, int, allow_zero=True)
        return int(ids[0])
    return DEFAULT_TOKENS[name]


def _quantization(data: dict[str, Any]) -> Mxfp8 | None:
    found = _agree_or_none(data, ("quantization_config", f"{TEXT}.quantization_config"))
    if found is None:
        return None
    where = "quantization_config"
    if not isinstance(found, dict) or found.get("quant_method") != "mxfp8":
        method = found.get("quant_method") if isinstance(found, dict) else found
        raise ConfigError(
            f"{where}.quant_method is {method!r}, which is not supported: expected 'mxfp8'"
        )
    if found.get("weight_block_size") != [1, 32]:
        raise ConfigError(
            f"{where}.weight_block_size is {found.get('weight_block_size')!r}, expected [1, 32]"
        )
    ignored = found.get("ignored_layers")
    if not isinstance(ignored, list) or not all(isinstance(x, str) and x for x in ignored):
        raise ConfigError(f"{where}.ignored_layers is {ignored!r}, expected a list of names")
    return Mxfp8(tuple(ignored))


def _agree_or_none(data: dict[str, Any], keys: tuple[str, ...]) -> Any:
    return None if all(_find(data, key) is None for key in keys) else _agree(data, keys)
