"""The helpers of the model files, without a server."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from m3trt.preprocess.errors import PreprocessError
from m3trt.preprocess.prompt import Preprocessor
from m3trt.runtime.request import EngineClosedError, Output, QueueFullError, RequestError
from m3trt.serve.errors import failure_of
from m3trt.serve.generation import (
    Delivery,
    ModelDefaults,
    failure_arrays,
    merge,
    output_arrays,
    parse_request,
)
from m3trt.serve.inflight import InflightCount, read_count
from m3trt.serve.prompts import preprocess, refuse_unsupported, word_list
from m3trt.serve.pump import Live, ResponsePump
from m3trt.serve.sender import FINAL, SafeSender
from m3trt.serve.texts import failure_in
from m3trt.serve.values import int32, strings

pytestmark = pytest.mark.smoke

DEFAULTS = ModelDefaults((9,), True, np.dtype(ml_dtypes.bfloat16), 100, 50)


class FakeSender:
    """Triton's sender, which must not be touched after FINAL."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.ended = False
        self.is_cancelled_answer = False

    def send(self, response: Any = None, flags: int = 0) -> None:
        assert not self.ended, "touched after FINAL"
        self.ended = flags == FINAL
        if response is not None:
            self.sent.append(response)

    def is_cancelled(self) -> bool:
        assert not self.ended, "the server would have crashed"
        return self.is_cancelled_answer


def test_a_sender_ends_once_and_is_not_touched_again() -> None:
    fake = FakeSender()
    sender = SafeSender(fake)
    assert sender.send("a")
    assert sender.send("b", final=True)
    assert not sender.send("c")
    assert not sender.send("c", final=True)
    assert not sender.finish()
    assert not sender.cancelled()
    assert (fake.sent, fake.ended) == (["a", "b"], True)


def test_a_sender_that_many_threads_use() -> None:
    for _ in range(50):
        fake = FakeSender()
        sender = SafeSender(fake)
        actions = [sender.finish, lambda: sender.send("x", final=True), sender.cancelled]  # noqa: B023
        threads = [threading.Thread(target=action) for action in actions * 3]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert fake.ended


def test_a_response_that_cannot_be_sent_still_ends_the_request() -> None:
    class Broken(FakeSender):
        def send(self, response: Any = None, flags: int = 0) -> None:
            if response is not None:
                raise ValueError("no such tensor")
            super().send(response, flags)

    fake = Broken()
    with pytest.raises(ValueError, match="no such tensor"):
        SafeSender(fake).send("x", final=True)
    assert fake.ended


def test_the_pump_joins_what_waits_and_keeps_the_order() -> None:
    gate, ended = threading.Event(), threading.Event()
    fake = FakeSender()

    def respond(arrays: dict[str, Any]) -> Any:
        gate.wait(10)
        return arrays

    pump = ResponsePump(respond, lambda live: None, lambda live: ended.set(), lambda: None)
    live = Live("1", "client", SafeSender(fake))
    pump.add(live)
    for i in range(10):
        pump.put(live, Output("1", (i,), tuple(range(i))[-3:], "stop" if i == 9 else None))
    gate.set()
    assert ended.wait(10)
    pump.close()
    ids = [arrays["output_ids"].reshape(-1).tolist() for arrays in fake.sent]
    assert [id_ for part in ids for id_ in part] == list(range(10))
    assert len(ids) < 10
    assert fake.ended
    assert pump.live() == []
    first_of_last = ids[-1][0]
    assert fake.sent[-1]["_previous_ids"].tolist() == list(range(first_of_last))[-3:]


def test_the_pump_notices_clients_that_have_gone() -> None:
    gone = threading.Event()
    fake = FakeSender()
    fake.is_cancelled_answer = True
    pump = ResponsePump(
        lambda arrays: arrays, lambda live: gone.set(), lambda live: None, lambda: None, 0.01
    )
    pump.add(Live("1", "", SafeSender(fake)))
    assert gone.wait(10)
    pump.close()


def test_merged_outputs_say_the_same() -> None:
    first = Output("r", (1, 2), (0,), log_probs=(-1.0, -2.0), cum_log_prob=-3.0)
    second = Output("r", (3,), (0, 1, 2), "stop", "", 2, (-4.0,), -7.0, 5, 3)
    both = merge(first, second)
    assert (both.new_ids, both.previous_ids, both.finish_reason) == ((1, 2, 3), (0,), "stop")
    assert (both.log_probs, both.cum_log_prob, both.trim_bytes) == ((-1.0, -2.0, -4.0), -7.0, 2)


def request_arrays(**more: Any) -> dict[str, Any]:
    base = {"input_ids": int32(1, 2, 120), "input_lengths": int32(3)}
    return {**base, "request_output_len": int32(4), **more}


def test_requests_are_read_and_copied() -> None:
    rows = np.arange(21 * 4, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(21, 4)
    bits = rows.view(np.uint16).copy()
    arrays = request_arrays(
        _prompt_embedding_table=bits,
        stop_words=strings("a", "", "ü"),
        bad_words_list=word_list([[5], [6, 7]]),
        embedding_bias=np.array([0, 0, 2.5], np.float32),
        runtime_top_p=np.zeros(1, np.float32),
        seed=np.array([2**63], np.uint64),
    )
    request, delivery = parse_request(arrays, "7", DEFAULTS)
    bits[:] = 0
    assert request.prompt_embedding_table is not None
    assert np.array_equal(request.prompt_embedding_table, rows)
    assert request.end_ids == (9,)
    assert request.stop_words == (b"a", "ü".encode())
    assert request.sampling.bad_words == ((5,), (6, 7))
    assert request.sampling.embedding_bias == ((2, 2.5),)
    assert (request.sampling.top_p, request.sampling.seed) == (1.0, 2**63)
    assert delivery == Delivery()
    assert not request.streaming


def test_end_ids_and_echo() -> None:
    arrays = request_arrays(end_id=int32(3), exclude_input_in_output=np.array([False]))
    request, delivery = parse_request(arrays, "7", DEFAULTS)
    assert request.end_ids == (3,)
    assert delivery.echo_ids == (1, 2, 50)
    output = Output("7", (8,), finish_reason="length")
    assert output_arrays(output, delivery, first=True)["output_ids"].tolist() == [[1, 2, 50, 8]]
    assert output_arrays(output, delivery, first=False)["output_ids"].tolist() == [[8]]
    assert parse_request(request_arrays(end_id=int32(-1)), "7", DEFAULTS)[0].end_ids == ()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        pytest.param({"beam_width": int32(2)}, "beam_width is 2", id="beams"),
        pytest.param({"input_lengths": int32(4)}, "input_lengths is 4", id="length"),
        pytest.param({"input_lengths": int32(0)}, "prompt is empty", id="empty"),
        pytest.param({"temperature": np.float32([np.nan])}, "temperature is nan", id="nan"),
    ],
)
def test_wrong_requests(arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_request(request_arrays(**arrays), "7", DEFAULTS)


def test_errors_have_codes_and_travel_in_band() -> None:
    codes = {
        RequestError("x"): "INVALID_ARG",
        PreprocessError("x"): "INVALID_ARG",
        QueueFullError("x"): "UNAVAILABLE",
        EngineClosedError("x"): "INTERNAL",
        KeyError("x"): "INTERNAL",
    }
    for error, code in codes.items():
        failure = failure_of(error)
        assert failure.code == code
        assert failure_in(failure_arrays(failure)) == failure
    assert failure_in(output_arrays(Output("", (1,)), Delivery(), first=True)) is None


def test_parameters_that_mean_an_input() -> None:
    refuse_unsupported("")
    refuse_unsupported('{"id": "x", "user": "y", "triton_enable_empty_final_response": true}')
    for name, message in {"lora_task_id": "not supported", "max_token": "max_tokens"}.items():
        with pytest.raises(PreprocessError, match=message):
            refuse_unsupported(f'{{"{name}": 1}}')


def test_preprocessing_of_a_prompt_leaves_vision_out(engine_dir: Path) -> None:
    preprocessor = Preprocessor.load(engine_dir)
    arrays = {"QUERY": strings("hello"), "BAD_WORDS_DICT": strings("a", "b c")}
    found = preprocess(preprocessor, arrays)
    assert set(found) == {"INPUT_ID", "REQUEST_INPUT_LEN", "BAD_WORDS_IDS", "_cu_seqlens"}
    assert found["REQUEST_INPUT_LEN"].tolist() == [found["INPUT_ID"].size]
    assert found["_cu_seqlens"].tolist() == [0]
    pixels = np.zeros((2, 40, 40, 3), np.uint8)
    found = preprocess(preprocessor, {**arrays, "IMAGE_BYTES": pixels})
    assert found["_pixel_values"].dtype == np.uint16
    assert found["_cu_seqlens"].size == 3
    assert len(found["_pixel_values"]) == len(found["_patch_positions"])


def test_counts_survive_their_writer(tmp_path: Path) -> None:
    path = tmp_path / "model"
    assert read_count(path) == 0
    count = InflightCount(path)
    count.add(3)
    count.add(-1)
    assert read_count(path) == 2
    InflightCount(None).add(1)
