"""The GPU benches say in a sentence that they cannot run here."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

CONFIG = Path(__file__).parents[1] / "data" / "minimax_m3_config.json"
BENCHES = {
    "cache_update": [],
    "decode": [],
    "fp8_effect": [],
    "gemm": ["--model_config", str(CONFIG)],
    "load": ["--model_config", str(CONFIG)],
    "moe": [],
    "norm": [],
    "paged_attention": [],
    "prefill": [],
    "slice": ["--model_config", str(CONFIG), "slice"],
    "tensor_parallel": ["--model_config", str(CONFIG), "--tp_size", "2"],
}

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("name", BENCHES)
def test_a_machine_without_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    bench = importlib.import_module(f"m3trt.bench.{name}")
    with pytest.raises(SystemExit) as ended:
        bench.main(BENCHES[name])
    assert ended.value.code == 1
    wanted = "2 GPUs" if name == "tensor_parallel" else "1 GPU"
    error = capsys.readouterr().err
    assert error.startswith(f"error: python -m m3trt.bench.{name} needs {wanted} and found 0")
