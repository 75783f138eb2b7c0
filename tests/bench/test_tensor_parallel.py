"""The parts of the tensor-parallel bench that need no GPU."""

from __future__ import annotations

import json

import numpy as np
import pytest
from m3trt.bench import random_engine
from m3trt.bench.tensor_parallel import CASES, estimate, likeness
from m3trt.convert.__main__ import main as convert
from m3trt.convert.configuration import M3Config
from m3trt.convert.tiny import write_tiny_checkpoint

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_get_what_convert_would_give_them(tmp_path, tp_size):
    write_tiny_checkpoint(tmp_path / "hf", "real-blocks", seed=1)
    for size in (1, tp_size):
        command = ["--model_dir", str(tmp_path / "hf"), "--output_dir", str(tmp_path / f"{size}")]
        assert convert([*command, "--tp_size", str(size)]) == 0
    config = M3Config.from_json(json.loads((tmp_path / f"{tp_size}/config.json").read_text()))
    whole = load_file(tmp_path / "1/rank0.safetensors")
    for rank in range(tp_size):
        for name, expected in load_file(tmp_path / f"{tp_size}/rank{rank}.safetensors").items():
            part = random_engine.shard(name, whole[name], config, rank)
            assert torch.equal(part, expected), name


def test_the_estimate_for_more_ranks():
    assert estimate(7e-6, 7e-6, 2, 2) == pytest.approx(7e-6)
    assert estimate(7.85e-6, 7.85e-6, 2, 8) == pytest.approx(0.85e-6 + 7 * 7e-6), "all latency"
    assert estimate(1e-3, 0.85e-6, 2, 8) == pytest.approx(1e-3 * 7 / 4, rel=1e-2), "all bytes"


def test_likeness():
    logits = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32)
    other = logits.copy()
    other[2] = other[2, ::-1]
    same, different = likeness(logits, logits), likeness(logits, other)
    assert same == pytest.approx({"cosine": 1, "worst_row_cosine": 1, "same_choice": 1})
    assert different["worst_row_cosine"] < 0.9
    assert different["same_choice"] == pytest.approx(2 / 3)


def test_no_case_shares_pages():
    assert max(case.requests * -(-(case.context + case.new) // 128) for case in CASES) < 16384
