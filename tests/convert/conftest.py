"""Tiny source checkpoints, made once a session, and small helpers around the command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (lets safetensors name bfloat16 and float8 for NumPy)
import numpy as np
import numpy.typing as npt
import pytest
from m3trt.convert.__main__ import main
from m3trt.convert.reader import FileReader, read_checkpoint, read_header
from m3trt.convert.tiny import write_tiny_checkpoint

Arrays = dict[str, npt.NDArray[Any]]


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny(geometry, dtype=..., mxfp8=...)`: a source checkpoint, shared: do not change it."""
    made: dict[tuple[Any, ...], Path] = {}

    def make(geometry: str = "parallel", dtype: str = "bfloat16", mxfp8: bool = False) -> Path:
        key = (geometry, dtype, mxfp8)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("tiny") / "source"
            write_tiny_checkpoint(made[key], geometry, dtype=dtype, mxfp8=mxfp8)
        return made[key]

    return make


@pytest.fixture
def source(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A bf16 checkpoint of this test's own, free to damage."""
    return Path(shutil.copytree(tiny("small"), tmp_path / "source"))


@pytest.fixture
def convert(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Result]:
    """Run the command on a source into `tmp_path / "output"`."""

    def run(model_dir: Path, *flags: str, output: Path = tmp_path / "output") -> Result:
        code = main(["--model_dir", str(model_dir), "--output_dir", str(output), *flags])
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture
def fails(convert: Callable[..., Any], tmp_path: Path) -> Callable[..., str]:
    """Run the command, expect failure and no trace of an output; returns the message."""

    def run(source: Path, *flags: str, **options: Path) -> str:
        before = sorted(path.name for path in tmp_path.iterdir())
        result = convert(source, *flags, **options)
        assert result.code == 1
        assert result.out == ""
        assert "Traceback" not in result.err
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        return str(result.err)

    return run


@pytest.fixture(scope="session")
def load_tensors() -> Callable[[Path], Arrays]:
    """All tensors of a file (or of a source directory) as arrays."""

    def load(path: Path) -> Arrays:
        stored = read_checkpoint(path) if path.is_dir() else read_header(path)
        reader = FileReader()
        arrays = {
            name: reader.read(tensor, 0, int(np.prod(tensor.shape))).reshape(tensor.shape)
            for name, tensor in stored.items()
        }
        reader.close()
        return arrays

    return load


@pytest.fixture
def released() -> dict[str, Any]:
    """The released bf16 `config.json`."""
    data = Path(__file__).parents[1] / "data" / "minimax_m3_config.json"
    config: dict[str, Any] = json.loads(data.read_text())
    return config
