"""The engine's thread: outputs, cancellation, errors."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from m3trt.runtime.request import (
    EngineClosedError,
    Output,
    QueueFullError,
    RequestError,
    SamplingParams,
)

pytestmark = pytest.mark.smoke


def test_streams_and_ends(kit: Any) -> None:
    rig = kit.rig()
    request = kit.request(max_tokens=6)
    receiver = rig.submit(request)
    final = receiver.wait()
    ids, reason, text = kit.naive(request)
    assert (receiver.ids, final.finish_reason, receiver.text) == (ids, reason, text)
    assert [len(o.new_ids) for o in receiver.outputs] == [1] * 6
    assert (final.num_input_tokens, final.num_output_tokens, final.error) == (3, 6, "")
    receiver.check_previous_ids()


def test_without_streaming_one_final_output(kit: Any) -> None:
    rig = kit.rig()
    request = kit.request(max_tokens=6, streaming=False, return_log_probs=True)
    receiver = rig.submit(request)
    final = receiver.wait()
    assert receiver.outputs == [final]
    assert list(final.new_ids) == kit.naive(request)[0]
    assert final.previous_ids == ()
    assert len(final.log_probs) == 6
    assert final.cum_log_prob == pytest.approx(sum(final.log_probs))


def greedy_ids(kit: Any, count: int) -> list[int]:
    return kit.naive(kit.request(max_tokens=count))[0]


def test_end_id_is_not_delivered(kit: Any) -> None:
    ids = greedy_ids(kit, 8)
    rig = kit.rig()
    end = next(i for i in range(1, 8) if ids[i] not in ids[:i])
    receiver = rig.submit(kit.request(end_ids=(ids[end],)))
    final = receiver.wait()
    assert receiver.ids == ids[:end]
    assert final.finish_reason == "stop"
    assert final.num_output_tokens == end + 1


def test_stop_word_across_tokens(kit: Any) -> None:
    rig = kit.rig()
    ids = greedy_ids(kit, 20)
    text = b"".join(map(kit.token_bytes, ids))
    word = text[5:9]
    receiver = rig.submit(kit.request(max_tokens=20, stop_words=(word,), return_log_probs=True))
    assert receiver.wait().finish_reason == "stop"
    assert receiver.text == text[: text.find(word)]
    assert [len(o.log_probs) for o in receiver.outputs] == [
        len(o.new_ids) for o in receiver.outputs
    ]


def test_log_probs_do_not_depend_on_sampling(kit: Any) -> None:
    rig = kit.rig()
    sampling = SamplingParams(temperature=3.0, top_k=4)
    receiver = rig.submit(kit.request(sampling=sampling, return_log_probs=True))
    final = receiver.wait()
    log_probs = [p for output in receiver.outputs for p in output.log_probs]
    assert len(log_probs) == 8
    assert all(p < 0 for p in log_probs)
    assert final.cum_log_prob == pytest.approx(sum(log_probs))


def test_seeds_do_not_depend_on_the_batch(kit: Any) -> None:
    def sampled(name: str, seed: int) -> Any:
        params = SamplingParams(temperature=1.0, top_p=0.9, seed=seed)
        return kit.request(name, sampling=params, max_tokens=20)

    alone = kit.rig().submit(sampled("a", 7))
    alone.wait()
    rig = kit.rig(max_num_tokens=4)
    rig.executor.gate.clear()
    others = [rig.submit(sampled(f"o{i}", i)) for i in range(9)]
    together = rig.submit(sampled("a", 7))
    rig.executor.gate.set()
    together.wait()
    assert together.ids == alone.ids
    for i, other in enumerate(others):
        other.wait()
        assert other.ids == kit.naive(sampled("x", i))[0]


def test_refused_at_submit(kit: Any) -> None:
    rig = kit.rig(num_pages=4)
    for text, options in {
        "max_seq_len": {"max_tokens": 1000},
        "cache pages": {"max_tokens": 30},
    }.items():
        with pytest.raises(RequestError, match=text):
            rig.submit(kit.request(**options))
    rig.submit(kit.request()).wait()


def test_duplicate_ids(kit: Any) -> None:
    rig = kit.rig()
    rig.executor.gate.clear()
    first = rig.submit(kit.request("same"))
    with pytest.raises(RequestError, match="'same' is in use"):
        rig.submit(kit.request("same"))
    rig.executor.gate.set()
    first.wait()
    rig.submit(kit.request("same")).wait()


def test_queue_is_bounded(kit: Any) -> None:
    rig = kit.rig(max_queue_size=3)
    rig.executor.gate.clear()
    receivers = [rig.submit(kit.request(str(i))) for i in range(7)]
    with pytest.raises(QueueFullError, match="7 requests run or wait"):
        rig.submit(kit.request("too-many"))
    rig.executor.gate.set()
    for receiver in receivers:
        assert receiver.wait().finish_reason == "length"
    rig.submit(kit.request("now")).wait()


def test_cancel_active_and_waiting(kit: Any) -> None:
    rig = kit.rig(max_batch_size=1, num_pages=20)
    rig.executor.gate.clear()
    active = rig.submit(kit.request("active", max_tokens=60))
    waiting = rig.submit(kit.request("waiting"))
    last = rig.submit(kit.request("last"))
    assert rig.executor.entered.wait(10)
    assert rig.engine.stats().waiting == 2
    assert rig.engine.cancel("active")
    assert rig.engine.cancel("active")
    assert rig.engine.cancel("waiting")
    assert not rig.engine.cancel("unknown")
    rig.executor.gate.set()
    assert active.wait().finish_reason == "cancelled"
    assert waiting.wait().finish_reason == "cancelled"
    assert waiting.ids == []
    assert last.wait().finish_reason == "length"
    assert not rig.engine.cancel("last")
    rig.check_no_leak()
    assert rig.engine.stats().finished == {"cancelled": 2, "length": 1}


def test_cancelled_requests_deliver_what_was_held_back(kit: Any) -> None:
    ids = greedy_ids(kit, 20)
    text = b"".join(map(kit.token_bytes, ids))
    rig = kit.rig()
    # After the first token everything may be the start of this stop word.
    word = text[len(kit.token_bytes(ids[0])) :] + b"never"
    request = kit.request(max_tokens=40, stop_words=(word,))
    receiver = kit.Receiver()

    def on_output(output: Output) -> None:
        receiver(output)
        rig.engine.cancel("a")

    rig.engine.submit(request, on_output)
    final = receiver.wait()
    assert final.finish_reason == "cancelled"
    assert receiver.ids == ids[: final.num_output_tokens]


def test_a_stale_cancel_spares_the_next_request_of_that_id(kit: Any) -> None:
    rig = kit.rig()
    first, second = kit.Receiver(), kit.Receiver()

    def on_output(output: Output) -> None:
        first(output)
        rig.engine.submit(kit.request(max_tokens=5), second)

    rig.executor.gate.clear()
    rig.engine.submit(kit.request(max_tokens=1), on_output)
    assert rig.executor.entered.wait(10)
    assert rig.engine.cancel("a")
    rig.executor.gate.set()
    assert first.wait().finish_reason == "length"
    assert second.wait().finish_reason == "length"


@pytest.mark.parametrize("when", ["prompt", "decode"])
def test_failed_step_fails_its_requests_only(kit: Any, when: str) -> None:
    rig = kit.rig(max_batch_size=2, max_num_tokens=8)

    def fail_next_step(output: Output) -> None:
        if not rig.engine.stats().finished.get("error"):
            rig.executor.fail_next = [RuntimeError("device lost")]

    def on_output(output: Output) -> None:
        failing[1](output)
        if when == "decode":
            fail_next_step(output)

    rig.executor.gate.clear()
    rig.engine.submit(
        kit.request("before", max_tokens=1),
        fail_next_step if when == "prompt" else kit.Receiver(),
    )
    assert rig.executor.entered.wait(10)
    failing = [kit.Receiver(), kit.Receiver()]
    rig.engine.submit(kit.request("0", max_tokens=20), failing[0])
    rig.engine.submit(kit.request("1", max_tokens=20), on_output)
    later = rig.submit(kit.request("later"))
    rig.executor.gate.set()
    for receiver in failing:
        final = receiver.wait()
        assert final.finish_reason == "error"
        assert final.error == "the step failed: device lost"
        assert len(receiver.ids) <= (1 if when == "decode" else 0)
    assert later.wait().finish_reason == "length"
    assert later.ids == greedy_ids(kit, 8)
    assert rig.engine.stats().alive
    rig.check_no_leak()


def test_wrong_logits_shape_is_a_failed_step(kit: Any) -> None:
    rig = kit.rig()
    rig.executor.spoil = lambda logits: logits[:, :-1]
    assert "expected (1, " in rig.submit(kit.request()).wait().error
    rig.executor.spoil = lambda logits: logits
    assert rig.submit(kit.request()).wait().finish_reason == "length"


def test_broken_logits_fail_one_request(kit: Any) -> None:
    rig = kit.rig(max_num_tokens=64)
    rig.executor.gate.clear()
    receivers = [rig.submit(kit.request(str(i))) for i in range(3)]
    assert rig.executor.entered.wait(10)

    def spoil(logits: Any) -> Any:
        if len(logits) == 3:
            logits[1, 4] = np.nan
        return logits

    rig.executor.spoil = spoil
    rig.executor.gate.set()
    reasons = [receiver.wait().finish_reason for receiver in receivers]
    assert sorted(map(str, reasons)) == ["error", "length", "length"]
    failed = receivers[reasons.index("error")].outputs[-1]
    assert "largest of" in failed.error
    rig.check_no_leak()


def test_token_bytes_that_raises_fails_one_request(kit: Any) -> None:
    rig = kit.rig()
    ids = greedy_ids(kit, 3)

    def broken(token: int) -> bytes:
        if token == ids[2]:
            raise KeyError(token)
        return kit.token_bytes(token)

    rig.engine._token_bytes = broken
    assert rig.submit(kit.request()).wait().finish_reason == "error"
    rig.check_no_leak()


@pytest.mark.parametrize("error", [ConnectionError("client is gone"), SystemExit(1)])
@pytest.mark.parametrize("at_final", [False, True])
def test_callback_that_raises(kit: Any, at_final: bool, error: BaseException) -> None:
    rig = kit.rig()
    calls = []

    def on_output(output: Output) -> None:
        calls.append(output)
        if output.final or not at_final:
            raise error

    rig.engine.submit(kit.request("bad", max_tokens=3), on_output)
    assert rig.submit(kit.request("good", max_tokens=20)).wait().finish_reason == "length"
    assert len(calls) == (3 if at_final else 1)
    assert rig.engine.stats().alive
    rig.check_no_leak()
    rig.submit(kit.request("bad")).wait()


@pytest.mark.parametrize("error", [AssertionError("a bug"), SystemExit(1)])
def test_scheduler_failure_ends_everything_with_an_error(
    kit: Any, monkeypatch: Any, error: BaseException
) -> None:
    rig = kit.rig()

    def plan() -> None:
        raise error

    monkeypatch.setattr(rig.engine._scheduler, "plan", plan)
    final = rig.submit(kit.request()).wait()
    assert final.finish_reason == "error"
    assert repr(error) in final.error
    rig.engine._thread.join(10)
    assert not rig.engine.stats().alive
    with pytest.raises(EngineClosedError, match="scheduler failed"):
        rig.submit(kit.request())


def test_stats(kit: Any) -> None:
    rig = kit.rig(num_pages=10, max_batch_size=2)
    rig.executor.gate.clear()
    receivers = [
        rig.submit(kit.request(str(i), input_ids=np.ones(9, np.int32), max_tokens=8))
        for i in range(3)
    ]
    assert rig.executor.entered.wait(10)
    while rig.engine.stats().active < 1:
        time.sleep(0.001)
    stats = rig.engine.stats()
    assert stats.active + stats.waiting == 3
    assert (stats.pages_max, stats.tokens_per_page, stats.max_requests) == (10, 4, 2)
    assert stats.pages_used == 4 * stats.active == 10 - stats.pages_free
    assert stats.context == stats.active
    rig.executor.gate.set()
    for receiver in receivers:
        receiver.wait()
    stats = rig.engine.stats()
    assert (stats.total_input_tokens, stats.total_output_tokens) == (27, 24)
    assert stats.finished == {"length": 3}
    assert stats.steps == len(rig.executor.steps)
    rig.check_no_leak()
