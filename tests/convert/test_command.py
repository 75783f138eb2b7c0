"""The command when all is well: flags, files, progress."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from m3trt.convert import progress
from m3trt.convert.__main__ import main
from m3trt.convert.checkpoint import COPIED_FILES
from safetensors.numpy import save_file

pytestmark = pytest.mark.smoke

TRTLLM_KEYS = {
    *("architecture", "dtype", "vocab_size", "hidden_size", "num_hidden_layers"),
    *("num_attention_heads", "hidden_act", "logits_dtype", "num_key_value_heads", "norm_epsilon"),
    *("position_embedding_type", "max_position_embeddings", "intermediate_size", "mapping"),
    *("quantization", "weight_layout"),
}


def test_writes_config_weights_and_tokenizer_files(
    source: Path, convert: Callable[..., Any], tmp_path: Path
) -> None:
    for name in COPIED_FILES:
        (source / name).write_text(json.dumps({"from": name}))
    (source / "unrelated.txt").write_text("stays behind")
    result = convert(source, "--tp_size", "2")
    assert result.code == 0
    assert re.search(r"output: 0\.00 GB in \d+\.\d s, peak RSS \d+\.\d\d GB\n$", result.out)
    output = tmp_path / "output"
    assert sorted(path.name for path in output.iterdir()) == sorted(
        [
            *COPIED_FILES,
            *("config.json", "rank0.safetensors", "rank1.safetensors", "vision.safetensors"),
        ]
    )
    for name in COPIED_FILES:
        assert (output / name).read_bytes() == (source / name).read_bytes()
    config = json.loads((output / "config.json").read_text())
    assert config.keys() >= TRTLLM_KEYS
    assert config["mapping"] == {"world_size": 2, "tp_size": 2, "pp_size": 1}


def test_text_only_checkpoint_has_no_vision_file(
    source: Path,
    convert: Callable[..., Any],
    load_tensors: Callable[[Path], dict[str, Any]],
    tmp_path: Path,
) -> None:
    config = json.loads((source / "config.json").read_text())
    del config["vision_config"]
    (source / "config.json").write_text(json.dumps(config))
    result = convert(source)
    assert result.code == 1
    assert re.search(r"tensors are unexpected.*: multi_modal_projector", result.err)
    kept = {
        name: values
        for name, values in load_tensors(source).items()
        if name.startswith("language_model")
    }
    text = tmp_path / "text"
    text.mkdir()
    save_file(kept, text / "model.safetensors")
    shutil.copy(source / "config.json", text)
    assert convert(text).code == 0
    assert not (tmp_path / "output" / "vision.safetensors").exists()


def test_save_config_only_needs_no_weights(
    released: dict[str, Any], convert: Callable[..., Any], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(released))
    result = convert(source, "--save_config_only", "--tp_size", "8")
    assert (result.code, result.err) == (0, "")
    assert "config.json for tp_size 8, no weights" in result.out
    assert [path.name for path in (tmp_path / "output").iterdir()] == ["config.json"]


def test_dry_run_writes_nothing(source: Path, convert: Callable[..., Any], tmp_path: Path) -> None:
    result = convert(source, "--dry_run", "--tp_size", "2")
    assert result.code == 0
    assert result.out.startswith("rank0.safetensors: 53 tensors, 0.00 GB\nrank1.safetensors")
    assert "read 0.00 GB, write 0.00 GB" in result.out
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_progress_lines(
    source: Path, convert: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    result = convert(source)
    line = r"0\.0 of 0\.0 GB, \d+\.\d\d GB/s, \d+ s left, RSS \d+\.\d\d GB"
    assert re.search(line, result.err)


@pytest.mark.parametrize(
    "flags",
    [
        ["--tp_size", "0"],
        ["--tp_size", "x"],
        ["--dtype", "int8"],
        ["--workers", "-1"],
        ["--workers", "65"],
    ],
)
def test_wrong_flags(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--model_dir", "x", "--output_dir", "y", *flags])
    assert stopped.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_help_and_no_torch() -> None:
    code = "import sys, m3trt.convert.checkpoint as c; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    command = [sys.executable, "-m", "m3trt.convert", "--help"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for flag in ("--model_dir", "--tp_size", "--workers", "--save_config_only", "--dry_run"):
        assert flag in text
