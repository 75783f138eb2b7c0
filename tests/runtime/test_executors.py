"""Which executor an engine directory gets, and why."""

from __future__ import annotations

import logging
import types

import pytest
from m3trt.build.engine_dir import EngineDirError
from m3trt.runtime import executors

pytestmark = pytest.mark.smoke


@pytest.fixture
def engine(monkeypatch):
    """engine(library, targets, device) -> a directory, on a machine with that GPU and torch."""

    def make(library="tensorrt", targets=(90, 100), device=None, torch=True):
        monkeypatch.setattr(executors, "device_compute_capability", lambda: device)
        found = object() if torch else None
        monkeypatch.setattr(executors.importlib.util, "find_spec", lambda name: found)
        return types.SimpleNamespace(
            path="engine",
            environment=types.SimpleNamespace(library=library, compute_capabilities=targets),
            build=types.SimpleNamespace(
                max_pages=64, max_batch_size=8, max_pages_per_sequence=lambda config: 16
            ),
            config=types.SimpleNamespace(vision=None),
            check_environment=lambda runtime: None,
        )

    return make


@pytest.mark.parametrize(
    ("machine", "expected", "reason"),
    [
        pytest.param({"device": 90}, "tensorrt", "for this GPU", id="gpu"),
        pytest.param({}, "reference", "no GPU", id="no-gpu"),
        pytest.param({"library": "reference", "device": 90}, "reference", "no compiled", id="onnx"),
        pytest.param({"device": 80}, "reference", "the GPU has 80", id="other-gpu"),
        pytest.param({"device": 90, "torch": False}, "reference", "torch", id="no-torch"),
    ],
)
def test_auto_logs_its_choice(engine, caplog, machine, expected, reason):
    with caplog.at_level(logging.INFO):
        assert executors.choose_runtime(engine(**machine)) == expected
    assert f"runtime {expected}" in caplog.text
    assert reason in caplog.text


def test_a_runtime_that_cannot_run_is_an_error(engine):
    with pytest.raises(EngineDirError, match="cannot run with tensorrt: this machine has no GPU"):
        executors.choose_runtime(engine(), "tensorrt")
    with pytest.raises(ValueError, match="'onnx' is unknown, expected auto or one of"):
        executors.choose_runtime(engine(), "onnx")


def test_pages(engine, monkeypatch):
    from m3trt.runtime.reference import executor

    monkeypatch.setattr(executor, "ReferenceExecutor", lambda engine, num_pages: num_pages)
    assert executors.create_executor(engine()) == 64
    assert executors.create_executor(engine(), num_pages=5) == 5
    with pytest.raises(ValueError, match="num_pages is 65, the engine was built for 1 to 64"):
        executors.create_executor(engine(), num_pages=65)


def test_a_model_without_vision(engine):
    with pytest.raises(ValueError, match="no vision tower"):
        executors.create_vision_executor(engine())
