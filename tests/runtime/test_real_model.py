"""The engine on a tiny model in the reference executor: in flight = alone, text and image rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from m3trt.build.__main__ import main as build
from m3trt.build.engine_dir import EngineDir
from m3trt.convert.__main__ import main as convert
from m3trt.convert.tiny import write_tiny_checkpoint
from m3trt.runtime.engine import InflightEngine, engine_limits
from m3trt.runtime.executors import create_executor
from m3trt.runtime.request import GenerationRequest, RequestError, SamplingParams
from m3trt.runtime.step import StepInputs

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real-model")
    checkpoint, middle, engine = folder / "hf", folder / "ckpt", folder / "engine"
    write_tiny_checkpoint(checkpoint, "small", seed=1)
    command = ["--model_dir", str(checkpoint), "--output_dir", str(middle), "--dtype", "float32"]
    assert convert(command) == 0
    command = ["--checkpoint_dir", str(middle), "--output_dir", str(engine)]
    command += ["--runtime", "reference", "--max_num_tokens", "32", "--max_seq_len", "256"]
    assert build([*command, "--max_batch_size", "4", "--max_multimodal_len", "10"]) == 0
    return engine


def alone(engine_dir: Path, request: GenerationRequest) -> list[int]:
    """Greedy ids by a plain loop: the prompt in one step, then token by token."""
    engine = EngineDir.load(engine_dir)
    executor = create_executor(engine, num_pages=32)
    ids, start, answer = request.input_ids, 0, list[int]()
    table = request.prompt_embedding_table
    while len(answer) < request.max_tokens:
        end = start + ids.size
        logits = executor.step(
            StepInputs(
                input_ids=ids,
                position_ids=np.arange(start, end, dtype=np.int32),
                cu_query_lens=np.array([0, ids.size], np.int32),
                sequence_length=np.array([end], np.int32),
                kv_cache_block_offsets=np.arange(32, dtype=np.int32)[None],
                decode_shape=(int(bool(answer)), 1),
                logit_rows=np.array([ids.size - 1], np.int32),
                prompt_embedding_table=(
                    np.zeros((1, engine.config.hidden_size), np.float32) if table is None else table
                ),
            )
        )
        answer.append(int(logits[0].argmax()))
        ids, start = np.array(answer[-1:], np.int32), end
    executor.close()
    return answer


def requests() -> list[GenerationRequest]:
    rng = np.random.default_rng(0)
    made = []
    for i, length in enumerate([1, 7, 8, 9, 33, 64, 100, 150]):
        ids = rng.integers(0, 400, length).astype(np.int32)
        table = None
        if i % 2 and length > 8:
            rows = min(length - 4, 24)
            ids[2 : 2 + rows] = 512 + np.arange(rows)
            table = rng.standard_normal((rows, 64)).astype(np.float32)
        made.append(GenerationRequest(str(i), ids, 20, prompt_embedding_table=table))
    return made


def test_in_flight_equals_alone(kit: Any, engine_dir: Path) -> None:
    expected = [alone(engine_dir, request) for request in requests()]
    assert len({tuple(ids) for ids in expected}) == len(expected)
    engine = InflightEngine.load(engine_dir, lambda token: b"%d," % token)
    receivers = []
    for request in requests():
        receivers.append(kit.Receiver())
        engine.submit(request, receivers[-1])
    for receiver, ids in zip(receivers, expected, strict=True):
        assert receiver.wait(60).finish_reason == "length"
        assert receiver.ids == ids
    stats = engine.stats()
    assert stats.pages_used == 0
    assert stats.total_output_tokens == 160
    assert stats.steps < 80
    assert engine.close()


def test_sampled_stopped_and_cancelled(kit: Any, engine_dir: Path) -> None:
    def run(count: int) -> list[Any]:
        engine = InflightEngine.load(engine_dir, lambda token: b"%d," % token)
        receivers = []
        for i in range(count):
            receivers.append(kit.Receiver())
            request = GenerationRequest(
                str(i),
                np.arange(5 + 9 * i, dtype=np.int32),
                100,
                SamplingParams(temperature=1.0, top_p=0.9, seed=i),
                stop_words=(b"7,1", b"55"),
            )
            engine.submit(request, receivers[-1])
        engine.cancel("2")
        for receiver in receivers:
            receiver.wait(60)
        assert engine.stats().pages_used == 0
        assert engine.close()
        return receivers

    one, several = run(1), run(6)
    assert one[0].ids == several[0].ids
    assert several[2].outputs[-1].finish_reason == "cancelled"


def test_limits_are_those_of_the_build(engine_dir: Path) -> None:
    engine = EngineDir.load(engine_dir)
    limits = engine_limits(engine.config, engine.build)
    assert (limits.max_num_tokens, limits.max_batch_size, limits.max_prompt_rows) == (32, 4, 10)
    assert (limits.vocab_size, limits.hidden_size, limits.tokens_per_block) == (512, 64, 8)
    assert limits.dtype == np.float32


def test_too_few_pages(engine_dir: Path) -> None:
    engine = InflightEngine.load(engine_dir, lambda _: b"", num_pages=2)
    with pytest.raises(RequestError, match="the engine has 2"):
        engine.submit(GenerationRequest("a", np.ones(10, np.int32), 20), print)
    assert engine.close()
