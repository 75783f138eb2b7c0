"""Sources that cannot be converted: one sentence, exit code 1, and no trace of an output."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from m3trt.convert import checkpoint
from safetensors.numpy import save_file

pytestmark = pytest.mark.smoke

LM = "language_model.model"
K_PROJ = f"{LM}.layers.1.self_attn.k_proj.weight"


def shard_of(source: Path, name: str) -> Path:
    index = json.loads((source / "model.safetensors.index.json").read_text())
    return source / index["weight_map"][name]


Edit = Callable[..., str]


@pytest.fixture
def edit(load_tensors: Callable[[Path], dict[str, Any]]) -> Edit:
    """Change the tensors of the shard that holds K_PROJ, index included; returns its name."""

    def run(source: Path, change: Callable[[dict[str, Any]], None]) -> str:
        shard = shard_of(source, K_PROJ)
        tensors = load_tensors(shard)
        change(tensors)
        save_file(tensors, shard)
        path = source / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        kept = {n: file for n, file in index["weight_map"].items() if file != shard.name}
        path.write_text(json.dumps({"weight_map": kept | dict.fromkeys(tensors, shard.name)}))
        return shard.name

    return run


def replace(values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({K_PROJ: values})


# ---- tensors ---------------------------------------------------------------------------------


def test_missing_tensor(source: Path, edit: Edit, fails: Callable[..., str]) -> None:
    edit(source, lambda tensors: tensors.pop(K_PROJ))
    message = fails(source)
    assert f"1 tensors are missing: {K_PROJ}" in message
    assert str(source) in message


def test_many_missing_tensors_are_counted(source: Path, fails: Callable[..., str]) -> None:
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["num_local_experts"] = 16
    (source / "config.json").write_text(json.dumps(config))
    message = fails(source)
    assert "72 tensors are missing" in message
    assert "and 64 more" in message
    assert "block_sparse_moe.gate.weight is F32 [8, 64], expected BF16 or F32 or F16" in message


def test_unexpected_tensor(source: Path, edit: Edit, fails: Callable[..., str]) -> None:
    extra = f"{LM}.layers.1.self_attn.k_proj.bias"
    shard = edit(source, lambda tensors: tensors.update({extra: np.zeros(3, np.float32)}))
    assert f"1 tensors are unexpected, no rule reads them: {shard}: {extra}" in fails(source)


def test_prediction_layers_are_ignored(
    source: Path, edit: Edit, convert: Callable[..., Any]
) -> None:
    extra = {"mtp.0.proj.weight": np.zeros(3, np.float32), f"{LM}.mtp.x": np.zeros(3, np.int64)}
    edit(source, lambda tensors: tensors.update(extra))
    assert convert(source).code == 0


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (np.zeros((64, 32), ml_dtypes.bfloat16), "BF16 [64, 32]"),
        (np.zeros((2, 16, 64), ml_dtypes.bfloat16), "BF16 [2, 16, 64]"),
        (np.zeros((32, 64), np.int64), "I64 [32, 64]"),
        (np.zeros((32, 64), ml_dtypes.float8_e4m3fn), "F8_E4M3 [32, 64]"),
    ],
)
def test_wrong_shape_or_dtype(
    source: Path, edit: Edit, fails: Callable[..., str], values: Any, found: str
) -> None:
    shard = edit(source, replace(values))
    expected = f"{shard}: {K_PROJ} is {found}, expected BF16 or F32 or F16 [32, 64]"
    assert expected in fails(source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda tensors: tensors.pop(f"{K_PROJ}_scale_inv"),
            f"1 tensors are missing: {K_PROJ}_scale_inv",
            id="missing-scales",
        ),
        pytest.param(
            lambda tensors: tensors.update(
                {f"{LM}.layers.1.input_layernorm.weight_scale_inv": np.zeros(64, np.uint8)}
            ),
            "unexpected, no rule reads them",
            id="unused-scales",
        ),
        pytest.param(
            lambda tensors: tensors.update({f"{K_PROJ}_scale_inv": np.zeros((32, 64), np.uint8)}),
            f"{K_PROJ}_scale_inv is U8 [32, 64], expected U8 or F8_E8M0 [32, 2]",
            id="scales-of-another-shape",
        ),
        pytest.param(
            replace(np.zeros((32, 64), ml_dtypes.bfloat16)),
            f"{K_PROJ} is BF16 [32, 64], expected F8_E4M3 [32, 64]",
            id="not-quantised",
        ),
    ],
)
def test_mxfp8_tensors(
    tiny: Callable[..., Path],
    edit: Edit,
    fails: Callable[..., str],
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    message: str,
) -> None:
    source = Path(shutil.copytree(tiny("small", mxfp8=True), tmp_path / "source"))
    edit(source, change)
    assert message in fails(source)


# ---- files -----------------------------------------------------------------------------------


def test_truncated_shard(source: Path, fails: Callable[..., str]) -> None:
    shard = shard_of(source, K_PROJ)
    size = shard.stat().st_size
    os.truncate(shard, size - 1000)
    expected = f"{shard}: the file has {size - 1000} bytes, expected {size} as its header says"
    assert f"{expected}: truncated" in fails(source)


def test_shard_that_shrinks_while_it_is_read(
    source: Path, fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = shard_of(source, K_PROJ)
    real = checkpoint.write_weights

    def shrink_first(*arguments: Any) -> Any:
        os.truncate(shard, 20000)
        return real(*arguments)

    monkeypatch.setattr(checkpoint, "write_weights", shrink_first)
    message = fails(source)
    assert str(shard) in message
    assert "the file became shorter while it was read" in message


def with_header(header: Any, data: bytes = b"\0" * 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(begin: int = 0, end: int = 8, **changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]} | changes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "0 bytes, expected at least 8: truncated", id="empty"),
        pytest.param(b"\1\2\3", "3 bytes, expected at least 8", id="three-bytes"),
        pytest.param(b"\xff" * 64, "truncated or not safetensors", id="huge-header"),
        pytest.param(with_header({})[:9], "says its header has 2 bytes", id="cut-in-header"),
        pytest.param(with_header(b"{{{}"), "corrupt header", id="not-json"),
        pytest.param(with_header(b"\xff\xfe"), "corrupt header", id="not-utf8"),
        pytest.param(with_header(b"[" * 100000), "corrupt header", id="nested"),
        pytest.param(with_header([1]), "a list instead of an object", id="list"),
        pytest.param(
            with_header(b'{"a": 1, "a": 2}'), "corrupt header: 'a' occurs twice", id="twice"
        ),
        pytest.param(with_header({"a": 5}), "a is 5, expected dtype, shape", id="number"),
        pytest.param(
            with_header({"a": tensor(shape=[-2])}), "a has sizes [0, 8, -2]", id="negative"
        ),
        pytest.param(with_header({"a": tensor(shape=[2.0])}), "expected integers", id="fraction"),
        pytest.param(
            with_header({"a": tensor(dtype="F7")}), "a has dtype 'F7', expected one of", id="dtype"
        ),
        pytest.param(
            with_header({"a": tensor(shape=[3])}), "a is F32 [3] in 8 bytes, expected 12", id="size"
        ),
        pytest.param(
            with_header({"a": tensor(), "b": tensor(4, 8)}),
            "b starts at byte 4 of the data and overlaps the tensor before it, expected 8",
            id="overlap",
        ),
        pytest.param(
            with_header({"a": tensor(4, 8)}),
            "a starts at byte 4 of the data and follows a hole",
            id="hole",
        ),
        pytest.param(with_header({"a": tensor(0, 4)}), "too long", id="trailing-bytes"),
        pytest.param(with_header({"a": tensor()}, b""), "truncated", id="no-data"),
    ],
)
def test_corrupt_file(
    source: Path, fails: Callable[..., str], content: bytes, message: str
) -> None:
    shard = shard_of(source, K_PROJ)
    shard.write_bytes(content)
    found = fails(source)
    assert str(shard) in found
    assert message in found


def test_random_damage_never_escapes_as_another_error(
    source: Path, fails: Callable[..., str]
) -> None:
    """Bytes of the header changed at random: a ConvertError naming the checkpoint, or no harm."""
    rng = np.random.default_rng(0)
    shard = shard_of(source, K_PROJ)
    whole = shard.read_bytes()
    length = 8 + struct.unpack("<Q", whole[:8])[0]
    for _ in range(60):
        damaged = bytearray(whole)
        for position in rng.integers(0, length, 3):
            damaged[position] = rng.integers(256)
        if damaged[:length].rstrip() != whole[:length].rstrip():
            shard.write_bytes(damaged)
            assert str(source) in fails(source, "--dry_run")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"{", "expected JSON with a weight_map"),
        (b"{}", "expected JSON with a weight_map, found KeyError('weight_map')"),
        (b'{"weight_map": [1]}', "weight_map is [1], expected an object"),
        (b'{"weight_map": {"a": "../x"}}', "a is in '../x', expected a plain file name"),
        (b'{"weight_map": {"a": "none"}}', "does not exist, but model.safetensors.index.json"),
        (b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}', "says in no file"),
    ],
)
def test_corrupt_index(source: Path, fails: Callable[..., str], index: bytes, message: str) -> None:
    (source / "model.safetensors.index.json").write_bytes(index)
    found = fails(source)
    assert message in found
    assert str(source) in found


def test_index_names_a_tensor_that_no_file_has(source: Path, fails: Callable[..., str]) -> None:
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["ghost"] = shard_of(source, K_PROJ).name
    path.write_text(json.dumps(index))
    assert "names tensors that the files lack: ghost in model-0000" in fails(source)


def test_shards_without_index(source: Path, fails: Callable[..., str]) -> None:
    (source / "model.safetensors.index.json").unlink()
    assert "found: model-00001-of-00002.safetensors" in fails(source)


def test_no_checkpoint_at_all(fails: Callable[..., str], tmp_path: Path) -> None:
    assert "config.json does not exist" in fails(tmp_path / "nowhere")


def test_broken_link_to_a_tokenizer_file(source: Path, fails: Callable[..., str]) -> None:
    (source / "tokenizer.json").symlink_to("nowhere")
    assert f"No such file or directory: '{source / 'tokenizer.json'}'" in fails(source)
