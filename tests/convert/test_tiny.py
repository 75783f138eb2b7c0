"""Tiny checkpoints: transformers reads them, and the same arguments give the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from m3trt.convert.tiny import main, write_tiny_checkpoint
from m3trt.convert.tiny_config import GEOMETRIES
from m3trt.convert.tiny_weights import TensorPlan, draw, plan_tensors, quantise_mxfp8

pytestmark = pytest.mark.smoke

RELEASED_CONFIG = Path(__file__).parent.parent / "data" / "minimax_m3_config.json"


def load(directory: Path) -> dict[str, Any]:
    """All tensors as torch tensors, read through the index."""
    from safetensors.torch import load_file

    index = json.loads((directory / "model.safetensors.index.json").read_text())
    tensors: dict[str, Any] = {}
    for file in sorted(set(index["weight_map"].values())):
        content = load_file(directory / file)
        assert all(index["weight_map"][name] == file for name in content)
        tensors.update(content)
    assert tensors.keys() == index["weight_map"].keys()
    return tensors


@pytest.fixture(scope="module")
def from_pretrained(importable_torchvision: None) -> Callable[..., Any]:
    """from_pretrained(directory, **options) -> transformers' model, every weight of it read."""
    from transformers import AutoModelForImageTextToText

    def load_model(directory: Path, **options: Any) -> Any:
        model, info = AutoModelForImageTextToText.from_pretrained(
            directory, output_loading_info=True, attn_implementation="eager", **options
        )
        assert not any(info.values()), info
        return model.eval()

    return load_model


def test_plan_of_the_release() -> None:
    """Names and shapes add up to the published counts."""
    plans = list(plan_tensors(json.loads(RELEASED_CONFIG.read_text())))
    assert len({plan.name for plan in plans}) == len(plans) == 23_416
    assert sum(int(np.prod(plan.shape)) for plan in plans) == 427_040_140_160
    quantised = sum(int(np.prod(plan.shape)) for plan in plans if plan.kind == "linear")
    assert quantised == 423_670_579_200


@pytest.mark.full
@pytest.mark.parametrize(
    ("geometry", "dtype"),
    [
        ("small", "float32"),
        ("real-blocks", "bfloat16"),
        ("parallel", "bfloat16"),
        ("demo", "bfloat16"),
    ],
)
def test_transformers_loads_it(
    tiny: Callable[..., Path], from_pretrained: Callable[..., Any], geometry: str, dtype: str
) -> None:
    import torch

    directory = tiny(geometry, dtype=dtype)
    model = from_pretrained(directory, dtype=torch.float32)
    tensors = load(directory)
    sparse = model.config.text_config
    sizes = GEOMETRIES[geometry]
    assert sparse.layer_types == ["full_attention"] + ["minimax_m3_sparse"] * 3
    assert (sparse.index_block_size, sparse.index_topk_blocks) == (
        sizes.block_size,
        sizes.top_k_blocks,
    )
    expert = model.model.language_model.layers[1].mlp.experts.down_proj[3]
    name = "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight"
    assert tensors[name].dtype == getattr(torch, dtype)
    torch.testing.assert_close(expert, tensors[name].float(), rtol=0, atol=0)
    kept = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    if dtype == "bfloat16":
        assert len(kept) == 3 * 2 + 1  # gate and routing bias of three layers, patch embedding
    with torch.no_grad():
        logits = model(input_ids=torch.arange(20)[None]).logits
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.1


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("geometry", ["small", "demo"])
def test_transformers_loads_mxfp8(
    tiny: Callable[..., Path], from_pretrained: Callable[..., Any], geometry: str
) -> None:
    import torch

    directory = tiny(geometry, mxfp8=True)
    model = from_pretrained(directory)
    tensors = load(directory)
    text = model.model.language_model
    for name, parameter in (
        ("layers.0.self_attn.q_proj", text.layers[0].self_attn.q_proj.weight),
        ("layers.1.self_attn.index_k_proj", text.layers[1].self_attn.indexer.k_proj.weight),
        ("layers.2.block_sparse_moe.experts.5.w2", text.layers[2].mlp.experts.down_proj[5]),
    ):
        values = tensors[f"language_model.model.{name}.weight"]
        scales = tensors[f"language_model.model.{name}.weight_scale_inv"]
        assert values.dtype == torch.float8_e4m3fn
        assert scales.dtype == torch.uint8
        assert scales.shape == (values.shape[0], values.shape[1] // 32)
        power = torch.exp2(scales.double() - 127).repeat_interleave(32, dim=1)
        expected = (values.double() * power).to(torch.bfloat16)
        torch.testing.assert_close(parameter, expected, rtol=0, atol=0)
    assert "language_model.lm_head.weight_scale_inv" not in tensors


def test_quantisation_is_close() -> None:
    values = draw(TensorPlan("x", (64, 96), "linear"), seed=0)
    values[3, :32] = 0.0
    values[4, :32] *= 2.0**-60
    quantised, scales = quantise_mxfp8(values)
    power = np.ldexp(np.ones((64, 96)), scales.astype(np.int64).repeat(32, axis=1) - 127)
    found = quantised.astype(np.float64) * power
    blocks = np.abs(values).reshape(64, 3, 32).max(axis=-1).repeat(32, axis=1)
    assert np.all(np.abs(found - values) <= blocks / 8)  # a largest value over 448 saturates
    assert not found[3, :32].any()


@pytest.mark.parametrize(("geometry", "mxfp8"), [("demo", False), ("small", True)])
def test_same_arguments_same_bytes(tmp_path: Path, geometry: str, mxfp8: bool) -> None:
    directories = [tmp_path / name for name in ("first", "second", "other")]
    for directory, seed in zip(directories, (1, 1, 2), strict=True):
        write_tiny_checkpoint(directory, geometry, seed, mxfp8=mxfp8)
    first, second, other = (
        {file.name: file.read_bytes() for file in directory.iterdir()} for directory in directories
    )
    assert first == second
    assert first.keys() == other.keys()
    changed = {name for name in first if first[name] != other[name]}
    assert changed == {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}


@pytest.mark.full
def test_demo_writes_only_real_tokens(
    tiny: Callable[..., Path], from_pretrained: Callable[..., Any]
) -> None:
    """The constant channel holds through all layers and rules out ids without text."""
    import torch
    from m3trt.preprocess.tokenizer import Tokenizer

    directory = tiny("demo")
    model = from_pretrained(directory, dtype=torch.bfloat16)
    tokenizer = Tokenizer.load(directory)
    ids = torch.tensor([tokenizer.encode("]~!b[]~b]user\nHello![e~[\n]~b]ai\n")])
    grid = torch.tensor([[1, 4, 4]])
    pixels = torch.randn(16, 1176, generator=torch.Generator().manual_seed(0))
    picture = torch.cat([ids, torch.full((1, 4), 200025), ids], dim=1)
    with torch.no_grad():
        for inputs in (
            {"input_ids": ids},
            {"input_ids": picture, "pixel_values": pixels, "image_grid_thw": grid},
        ):
            out = model(**inputs, output_hidden_states=True)
            for hidden in out.hidden_states[:-1]:
                assert (hidden[0, :, 0] == 2.0).all()
            chances = torch.softmax(out.logits[0].float(), dim=-1)
            text = [id_ for id_ in range(700) if tokenizer.token_bytes(id_)]
            wanted = chances[:, [*text, 200020]].sum(dim=-1)
            assert (1 - wanted).max() < 1e-6


class TestFailures:
    def test_unknown_names(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="unknown geometry 'huge', expected one of"):
            write_tiny_checkpoint(tmp_path / "a", "huge")
        with pytest.raises(ValueError, match="unknown dtype 'int8'"):
            write_tiny_checkpoint(tmp_path / "a", dtype="int8")
        assert not list(tmp_path.iterdir())

    def test_existing_output_is_kept(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").touch()
        assert main(["--output_dir", str(tmp_path)]) == 1
        assert "already exists: remove it" in capsys.readouterr().err
        assert [file.name for file in tmp_path.iterdir()] == ["file"]

    def test_nothing_half_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full_disk(*_: Any) -> None:
            raise OSError("No space left on device")

        monkeypatch.setattr("m3trt.convert.tiny._write_shards", full_disk)
        with pytest.raises(OSError, match="No space"):
            write_tiny_checkpoint(tmp_path / "out", "small")
        assert not list(tmp_path.iterdir())

    def test_command_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        output = tmp_path / "deep" / "out"
        assert main(["--output_dir", str(output), "--geometry", "small", "--seed", "3"]) == 0
        assert capsys.readouterr().out.strip() == str(output)
        assert (output / "config.json").exists()
