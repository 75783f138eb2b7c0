"""An engine of two ranks on two GPUs gives the logits of one rank on one GPU."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from full_width_steps import LENGTH, SINGLE, build, full_width_logits, run_rank
from m3trt.bench.ranks import run_ranks
from m3trt.runtime.tensorrt.nccl import unique_id

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.full,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def on_gpus(driver, gpu_runtime, token_ids):
    """on_gpus(dtype, tp_size) -> logits of a sequence run eagerly in chunks, and of the same with
    captured decode steps at its end."""
    made = {}

    def make(dtype, tp_size):
        if (dtype, tp_size) not in made:
            run = driver("gqa16", dtype, tp_size, runtime=gpu_runtime)
            ids = token_ids(LENGTH)
            made[dtype, tp_size] = run.run(ids, chunk=2048), run.run(ids, chunk=2048, decode=SINGLE)
            run.close()
            torch.cuda.empty_cache()
        return made[dtype, tp_size]

    return make


def test_two_gpus_in_float32(on_gpus):
    for ours, theirs in zip(on_gpus("float32", 2), on_gpus("float32", 1), strict=True):
        error = np.abs(ours - theirs).max() / np.abs(theirs).max()
        print(f"relative error {error:.2e}")
        assert error < 1e-4


def test_two_gpus_in_bfloat16(on_gpus, within):
    """At most twice as far from float32 on one GPU as bfloat16 on one GPU is."""
    eager, captured = on_gpus("bfloat16", 2)
    eager_alone, captured_alone = on_gpus("bfloat16", 1)
    exact, exact_captured = on_gpus("float32", 1)
    within("eager", eager, eager_alone, exact)
    within("captured", captured[-SINGLE:], captured_alone[-SINGLE:], exact_captured[-SINGLE:])


def test_a_rank_that_dies_ends_the_group(driver, gpu_runtime, token_ids):
    """Nobody waits for it for ever: neither the step nor the end."""
    run = driver("gqa16", "bfloat16", 2, runtime=gpu_runtime)
    run.run(token_ids(20), decode=2)
    run.executor._ranks[0].end(0.0)
    start = time.monotonic()
    with pytest.raises(Exception, match="rank 1 failed: its process ended"):
        run.run(token_ids(20), decode=2)
    run.close()
    assert time.monotonic() - start < 20


def test_two_gpus_at_full_width(gpu_runtime, tmp_path):
    """Rounding may move a token or two to another expert or block."""
    path = build(gpu_runtime, tmp_path / "2", 2)
    with ThreadPoolExecutor(1) as pool:  # the ranks take a while to start
        pending = pool.submit(run_ranks, 2, 1, run_rank, path, gpu_runtime, unique_id())
        path = build(gpu_runtime, tmp_path / "1", 1)
        alone = full_width_logits(path, gpu_runtime, 1)
        [[first, second]] = pending.result()
    torch.cuda.empty_cache()
    assert first.tobytes() == second.tobytes()
    errors = np.abs(first - alone).max(axis=1) / np.abs(alone).max()
    print(f"largest relative errors {np.sort(errors)[-4:]}")
    assert np.sort(errors)[-3] < 1e-4
    assert errors[LENGTH:].max() < 1e-4
