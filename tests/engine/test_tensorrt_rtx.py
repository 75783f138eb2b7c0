"""Real engines, compiled ahead of time by TensorRT-RTX with the real plugin library."""

from __future__ import annotations

import logging
import re
import subprocess
import sys

import onnx
import pytest
from m3trt.build.__main__ import main
from m3trt.build.engine_dir import EngineDir

pytestmark = pytest.mark.full


def build(checkpoint, output, *options):
    arguments = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(output)]
    return main([*arguments, "--runtime", "tensorrt_rtx", *options])


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        pytest.param({}, ["--workers", "2"], id="bf16-two-workers"),
        pytest.param({"dtype": "float32"}, [], id="float32"),
        pytest.param({"tp_size": 8}, [], id="tp8"),
        pytest.param(
            {}, ["--kv_cache_dtype", "fp8", "--index_cache_dtype", "fp8"], id="fp8-caches"
        ),
        pytest.param({}, ["--compute_capabilities", "80", "--max_num_tokens", "64"], id="sm80"),
    ],
)
def test_engine_directory(checkpoint, tmp_path, caplog, changes, options):
    caplog.set_level(logging.INFO)
    output = tmp_path / "engine"
    assert build(checkpoint(**changes), output, *options) == 0
    engine = EngineDir.load(output)
    engine.check_environment("tensorrt_rtx")
    engine.check_weights()
    assert engine.environment.library_version.startswith("1.7.1")
    for program in (engine.engine(0), engine.vision_engine):
        assert program.stat().st_size > 10_000
        assert re.search(rf"{program.name}: .* s, peak memory .* GB, .* MB", caplog.text)
    assert all(engine.engine(r).samefile(engine.engine(0)) for r in range(engine.config.tp_size))


def test_refused_graph_names_node_and_attribute(checkpoint, tmp_path, capfd):
    """Head size 16 is what the smallest test checkpoints have; there are kernels for 128."""
    source = checkpoint(weights=False, head_size=16, rotary_dim=8, vision=None)
    assert build(source, tmp_path / "engine") == 1
    error = capfd.readouterr().err.rsplit("error: ", 1)[1]
    assert "layers.0.attention.cache_update" in error
    assert "attribute 'head_size' is 16" in error
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_missing_plugin_is_named(checkpoint, tmp_path, monkeypatch, capfd):
    source = checkpoint(weights=False, vision=None)
    assert build(source, tmp_path / "engine", "--workers", "1") == 0
    model = onnx.load(tmp_path / "engine" / "rank0.onnx")
    node = next(node for node in model.graph.node if node.op_type == "M3Gemm")
    node.op_type = "M3Unknown"
    from m3trt.build import programs

    monkeypatch.setattr(programs, "build_text_network", lambda *_: model)
    assert build(source, tmp_path / "other") == 1
    assert "has no plugin M3Unknown of version 1, which rank0.onnx" in capfd.readouterr().err


def test_plugins_load_once_however_often_they_are_asked_for():
    script = """if True:
        from m3trt.build.library import PLUGIN_LIBRARY, load_plugins
        registries = [load_plugins("tensorrt_rtx", PLUGIN_LIBRARY) for _ in range(2)]
        assert registries[0].get_creator("M3MoE", "1", "") is not None
    """
    subprocess.run([sys.executable, "-c", script], check=True)
