"""Bindings of the GPU executor against a TensorRT and a torch that run on the CPU."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from m3trt.runtime.tensorrt import memory
from m3trt.runtime.tensorrt.device_engine import DeviceEngine
from m3trt.runtime.tensorrt.executor import _pages_that_fit
from m3trt.runtime.tensorrt.step_context import Binding, DeviceError
from m3trt.runtime.weights import WeightFileError, find_weights
from safetensors.numpy import save_file

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("fake_gpu")]

WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def engine(engine_file, tmp_path):
    engine = DeviceEngine(engine_file(), "tensorrt", Path("plugins.so"))
    save_file({"layer.weight": WEIGHT}, tmp_path / "rank0.safetensors")
    engine.bind_weights(tmp_path / "rank0.safetensors")
    return engine


def test_steps_of_any_size_share_weights_and_cache(engine, rng):
    engine.bind_zeros("cache", (5, 3), "cache_out")
    total = np.zeros(3)
    for rows in (2, 8, 0, 1):
        x = rng.standard_normal((rows, 3)).astype(np.float32)
        y = engine.run({"x": x}, "y")
        assert y.shape == (rows, 2)
        assert np.allclose(y, x @ WEIGHT.T)
        total += x.sum(axis=0)
    cache = engine._bound["cache"].memory.numpy().view(np.float32).reshape(5, 3)
    assert np.allclose(cache, total, atol=1e-6)


def test_captured_steps_give_what_eager_ones_give(engine, rng):
    engine.bind_zeros("cache", (5, 3), "cache_out")
    total = np.zeros(3)
    for turn in range(3):
        for rows in (2, 8, 0):
            x = rng.standard_normal((rows, 3)).astype(np.float32)
            y = engine.run_captured({"x": x}, "y")
            assert np.allclose(y, x @ WEIGHT.T)
            assert engine.captured({"x": x}).graph.replays == turn
            eager = rng.standard_normal((5, 3)).astype(np.float32)
            assert np.allclose(engine.run({"x": eager}, "y"), eager @ WEIGHT.T)
            total += x.sum(axis=0) + eager.sum(axis=0)
    cache = engine._bound["cache"].memory.numpy().view(np.float32).reshape(5, 3)
    assert np.allclose(cache, total, atol=1e-5)
    assert len(engine._graphs) == 3


def test_an_engine_can_be_closed_twice(engine):
    engine.close()
    engine.close()


def test_an_input_that_is_not_bound_is_named(engine):
    with pytest.raises(DeviceError, match=r"inputs \['cache'\] are not set"):
        engine.run({"x": np.zeros((1, 3), np.float32)}, "y")


def test_a_shape_outside_the_profile_is_named(engine):
    engine.bind_zeros("cache", (5, 3), "cache_out")
    with pytest.raises(DeviceError, match=r"x \[9, 3\] is outside the engine's profile"):
        engine.run({"x": np.zeros((9, 3), np.float32)}, "y")


def test_a_wrong_dtype_is_named(engine):
    engine.bind_zeros("cache", (5, 3), "cache_out")
    with pytest.raises(TypeError, match="x is float64, expected float32"):
        engine.run({"x": np.zeros((1, 3))}, "y")


def test_weights_that_do_not_fit(engine, tmp_path):
    save_file({"layer.weight": WEIGHT.T.copy()}, tmp_path / "other.safetensors")
    with pytest.raises(WeightFileError, match=r"layer\.weight is float32 \[3, 2\], expected"):
        engine.bind_weights(tmp_path / "other.safetensors")


def test_an_engine_that_does_not_load(tmp_path):
    (tmp_path / "rank0.engine").touch()
    with pytest.raises(DeviceError, match=r"tensorrt cannot load .*rank0\.engine"):
        DeviceEngine(tmp_path / "rank0.engine", "tensorrt", Path("plugins.so"))


def test_a_binding_that_tensorrt_would_miscompute_is_refused(engine):
    with pytest.raises(ValueError, match="cache would have 2147483648 elements"):
        engine.bind("cache", Binding((2**31,), None))


@pytest.fixture
def many(tmp_path, rng):
    """A file of tensors that need one piece, several, and none."""
    shapes = {"large": (7, 11), "small": (3,), "empty": (0, 2), "odd": (5, 5)}
    arrays = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
    save_file(arrays, tmp_path / "many.safetensors")
    return tmp_path / "many.safetensors", arrays


@pytest.mark.parametrize("readers", [1, 3, 8])
def test_uploads_pass_through_small_buffers_and_report(many, readers, monkeypatch, caplog):
    path, arrays = many
    pinned = []
    made = memory.pinned
    monkeypatch.setattr(memory, "pinned", lambda size: pinned.append(size) or made(size))
    monkeypatch.setattr(memory, "READERS", readers)
    monkeypatch.setattr(memory, "PIECE", 100)
    stored = list(find_weights(path).values())
    with caplog.at_level(logging.INFO):
        uploaded = memory.upload(path, stored)
    for tensor, device in zip(stored, uploaded, strict=True):
        assert device.numpy()[: tensor.num_bytes].tobytes() == arrays[tensor.name].tobytes()
    assert len(pinned) == readers
    assert max(pinned) == 100
    assert caplog.text.count("weights: 0.0 of 0.0 GB") == 1


def test_reads_may_be_short(many, monkeypatch):
    path, arrays = many
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:33]], at))
    stored = find_weights(path)["large"]
    (device,) = memory.upload(path, [stored])
    assert device.numpy().tobytes() == arrays["large"].tobytes()


def test_a_file_that_shrinks_is_an_error(many):
    path, _ = many
    stored = list(find_weights(path).values())
    os.truncate(path, stored[0].offset + 10)
    with pytest.raises(OSError, match=r"many\.safetensors ends at \d+ bytes"):
        memory.upload(path, stored)


def test_a_read_that_fails_ends_the_others(many, monkeypatch):
    path, _ = many
    stored = list(find_weights(path).values())
    preadv, read = os.preadv, []

    def fail_first(descriptor, parts, at):
        read.append(at)
        if at == stored[0].offset:
            raise OSError("broken disk")
        time.sleep(0.02)
        return preadv(descriptor, parts, at)

    monkeypatch.setattr(os, "preadv", fail_first)
    monkeypatch.setattr(memory, "READERS", 3)
    monkeypatch.setattr(memory, "PIECE", 10)
    with pytest.raises(OSError, match="broken disk"):
        memory.upload(path, stored)
    assert len(read) < sum(tensor.num_bytes for tensor in stored) / memory.PIECE / 2


def test_caches_take_most_of_the_memory_that_is_left():
    assert _pages_that_fit(page_bytes=100) == 9
    with pytest.raises(DeviceError, match="use a larger GPU"):
        _pages_that_fit(page_bytes=1000)


def test_an_input_with_a_name_for_each_op_is_staged_once(engine_file, tmp_path, rng):
    path = engine_file()
    model = onnx.load(path)
    own = onnx.ValueInfoProto()
    own.CopyFrom(next(value for value in model.graph.input if value.name == "x"))
    own.name = "x@Accumulate"
    model.graph.input.append(own)
    reader = next(node for node in model.graph.node if node.op_type == "Accumulate")
    reader.input[list(reader.input).index("x")] = own.name
    onnx.save(model, path)

    engine = DeviceEngine(path, "tensorrt", Path("plugins.so"))
    save_file({"layer.weight": WEIGHT}, tmp_path / "rank0.safetensors")
    engine.bind_weights(tmp_path / "rank0.safetensors")
    engine.bind_zeros("cache", (5, 3), "cache_out")
    assert "x" in engine.inputs
    assert own.name not in engine.inputs
    x = rng.standard_normal((2, 3)).astype(np.float32)
    assert np.allclose(engine.run({"x": x}, "y"), x @ WEIGHT.T)
    cache = engine._bound["cache"].memory.numpy().view(np.float32).reshape(5, 3)
    assert np.allclose(cache, x.sum(axis=0), atol=1e-6)
    with pytest.raises(DeviceError, match=r"x \[9, 3\] is outside the engine's profile"):
        engine.run({"x": np.zeros((9, 3), np.float32)}, "y")
