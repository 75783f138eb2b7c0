"""Numbers: MXFP8, folded norms, rounding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from m3trt.convert.dtypes import cast, dequantise, gemma_scale
from m3trt.convert.reader import FileReader, read_checkpoint, read_header
from safetensors import safe_open

pytestmark = pytest.mark.smoke

BF16 = ml_dtypes.bfloat16


def every_pair() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Every e4m3 byte under every scale byte but NaN's: values [255, 256], scales [255, 8]."""
    values = np.tile(np.arange(256, dtype=np.uint8), (255, 1))
    return values, np.repeat(np.arange(255, dtype=np.uint8)[:, None], 8, axis=1)


def exact(values: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """value * 2**(byte - 127) in float64, which holds every product exactly."""
    wide = values.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return np.ldexp(wide, np.repeat(scales, 32, axis=1).astype(np.int64) - 127)


def test_every_mxfp8_product_is_exact_in_float32() -> None:
    values, scales = every_pair()
    expected = exact(values, scales)
    found = dequantise(values, scales, "F32").astype(np.float64)
    in_range = ~(np.abs(expected) > np.finfo(np.float32).max)
    np.testing.assert_array_equal(found[in_range], expected[in_range])
    assert np.isinf(found[~in_range]).all()


def test_every_mxfp8_product_is_exact_in_bfloat16() -> None:
    """All but a handful under bf16's smallest subnormal are exact, and those round to even."""
    values, scales = every_pair()
    expected = exact(values, scales)
    found = dequantise(values, scales, "BF16")
    with np.errstate(over="ignore"):
        rounded = expected.astype(np.float32).astype(BF16)
    np.testing.assert_array_equal(found.view(np.uint16), rounded.view(np.uint16))
    normal = (np.abs(expected) >= 2.0**-126) & (np.abs(expected) < 2.0**128)
    np.testing.assert_array_equal(found.astype(np.float64)[normal], expected[normal])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_mxfp8_checkpoint(
    tiny: Callable[..., Path],
    convert: Callable[..., Any],
    load_tensors: Callable[[Path], dict[str, npt.NDArray[Any]]],
    tmp_path: Path,
    dtype: str,
) -> None:
    """Through the command, sharded in both directions."""
    model_dir = tiny("parallel", mxfp8=True)
    assert convert(model_dir, "--tp_size", "2", "--dtype", dtype).code == 0
    source = load_tensors(model_dir)
    ranks = [load_tensors(tmp_path / "output" / f"rank{r}.safetensors") for r in range(2)]

    def expected(name: str) -> npt.NDArray[Any]:
        name = f"language_model.model.layers.1.{name}.weight"
        wide = exact(source[name].view(np.uint8), source[f"{name}_scale_inv"])
        return wide.astype(np.float32).astype(np.float32 if dtype == "float32" else BF16)

    to = "transformer.layers.1"
    for half, name in enumerate(("w1", "w3")):
        found = [np.split(rank[f"{to}.mlp.fc.weight"][5], 2)[half] for rank in ranks]
        whole = expected(f"block_sparse_moe.experts.5.{name}")
        np.testing.assert_array_equal(np.concatenate(found).view(np.uint8), whole.view(np.uint8))
    dense = np.concatenate([rank[f"{to}.attention.dense.weight"] for rank in ranks], axis=1)
    whole = expected("self_attn.o_proj")
    assert dense.dtype == whole.dtype
    np.testing.assert_array_equal(dense.view(np.uint8), whole.view(np.uint8))


def test_mxfp8_of_other_makers_is_refused(
    tiny: Callable[..., Path], convert: Callable[..., Any], tmp_path: Path
) -> None:
    """A scale byte of 255 means NaN: the message names file and tensor."""
    source = Path(shutil.copytree(tiny("parallel", mxfp8=True), tmp_path / "source"))
    name = "language_model.model.layers.2.self_attn.k_proj.weight_scale_inv"
    weight_map = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    shard = source / weight_map[name]
    with shard.open("r+b") as file:
        file.seek(read_header(shard)[name].offset + 3)
        file.write(b"\xff")
    result = convert(source)
    assert result.code == 1
    assert f"{shard.name}: {name}" in result.err
    assert "a scale of 255, which is NaN" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_norm_offsets_are_added_in_fp32() -> None:
    """Near zero a bf16 sum would lose the offset altogether."""
    small = np.array([1e-4, -3e-3, 0.0, 0.7, -1.0], BF16)
    found = gemma_scale(small, "F32")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.float32(1) + small.astype(np.float32))
    assert found[0] != 1.0


def test_narrowing_rounds_to_nearest_even() -> None:
    step = 2.0**-7  # of bf16 at 1
    values = np.array([1 + step / 2, 1 + 1.5 * step, 1 + 0.51 * step, np.nan, -np.inf], np.float32)
    found = cast(values, "BF16").astype(np.float64)
    np.testing.assert_array_equal(found, [1, 1 + 2 * step, 1 + step, np.nan, -np.inf])
    half = np.array([1 + 2.0**-10, 2.0**-24], np.float16)
    np.testing.assert_array_equal(cast(half, "F32"), half.astype(np.float64))
    np.testing.assert_array_equal(cast(half, "BF16").astype(np.float64), [1, 2.0**-24])


def test_float32_source_to_bfloat16_and_back(
    tiny: Callable[..., Path],
    convert: Callable[..., Any],
    load_tensors: Callable[[Path], dict[str, npt.NDArray[Any]]],
    tmp_path: Path,
) -> None:
    """What transformers saves in fp32 narrows; the router stays fp32; bf16 widens exactly."""
    convert(tiny("small", "float32"), "--dtype", "bfloat16", output=tmp_path / "narrow")
    convert(tiny("small", "bfloat16"), "--dtype", "float32", output=tmp_path / "wide")
    source = load_tensors(tiny("small", "float32"))
    narrow = load_tensors(tmp_path / "narrow" / "rank0.safetensors")
    wide = load_tensors(tmp_path / "wide" / "rank0.safetensors")
    head = source["language_model.lm_head.weight"]
    np.testing.assert_array_equal(narrow["lm_head.weight"], head.astype(BF16))
    np.testing.assert_array_equal(wide["lm_head.weight"], head.astype(BF16).astype(np.float32))
    gate = source["language_model.model.layers.1.block_sparse_moe.gate.weight"]
    np.testing.assert_array_equal(narrow["transformer.layers.1.mlp.router.weight"], gate)


def test_safetensors_itself_reads_the_output(
    tiny: Callable[..., Path], convert: Callable[..., Any], tmp_path: Path
) -> None:
    convert(tiny("small"))
    for file in ("rank0.safetensors", "vision.safetensors"):
        with safe_open(tmp_path / "output" / file, "numpy") as opened:
            assert len(list(opened.keys())) > 30


def test_reader_counts_elements(
    tiny: Callable[..., Path], load_tensors: Callable[[Path], dict[str, npt.NDArray[Any]]]
) -> None:
    tensor = read_checkpoint(tiny("small"))["language_model.lm_head.weight"]
    reader = FileReader()
    found = reader.read(tensor, 100, 50)
    reader.close()
    whole = load_tensors(tiny("small"))["language_model.lm_head.weight"]
    np.testing.assert_array_equal(found, whole.reshape(-1)[100:150])
