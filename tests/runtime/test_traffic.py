"""Random traffic: every request's output equals what it gets alone, and nothing leaks."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from m3trt.bench.records import append_record

pytestmark = pytest.mark.full

FUZZ_SECONDS = 240

LIMITS = [
    pytest.param({}, id="default"),
    pytest.param({"max_num_tokens": 4}, id="tiny-steps"),
    pytest.param({"max_num_tokens": 1, "max_batch_size": 1}, id="token-by-token"),
    pytest.param({"max_num_tokens": 64, "max_batch_size": 16}, id="wide"),
    pytest.param({"num_pages": 16}, id="few-pages"),
    pytest.param({"tokens_per_block": 1, "num_pages": 200}, id="page-of-one"),
    pytest.param({"max_prompt_rows": 2}, id="few-image-rows"),
]


def check(kit: Any, request: Any, receiver: Any) -> None:
    ids, reason, text = kit.naive(request)
    final = receiver.wait()
    receiver.check_previous_ids()
    assert receiver.ids == ids[: len(receiver.ids)]
    if final.finish_reason == "cancelled":
        assert text.startswith(receiver.text) or receiver.text.startswith(text)
        return
    assert final.finish_reason == reason
    assert receiver.text == text
    assert request.streaming or len(receiver.outputs) == 1
    if request.return_log_probs:
        assert sum(len(o.log_probs) for o in receiver.outputs) == len(receiver.ids)


@pytest.mark.parametrize("limits", LIMITS)
def test_outputs_equal_those_of_requests_alone(kit: Any, limits: dict[str, int]) -> None:
    rng = np.random.default_rng(len(str(limits)))
    rig = kit.rig(**limits)
    pairs = []
    for i in range(80):
        request = kit.random_request(rng, str(i))
        pairs.append((request, rig.submit(request)))
        if rng.random() < 0.3:
            time.sleep(float(rng.random()) * 0.01)
    for request, receiver in pairs:
        check(kit, request, receiver)
    rig.check_no_leak()
    assert rig.engine.stats().finished.keys() <= {"stop", "length"}


@pytest.mark.parametrize("seed", range(3))
def test_cancellations_from_several_threads(kit: Any, seed: int) -> None:
    rig = kit.rig(num_pages=40)
    pairs: list[Any] = []
    failures: list[BaseException] = []

    def client(number: int) -> None:
        rng = np.random.default_rng([seed, number])
        try:
            for i in range(40):
                request = kit.random_request(rng, f"{number}-{i}")
                receiver = rig.submit(request)
                pairs.append((request, receiver))
                if rng.random() < 0.5:
                    time.sleep(float(rng.random()) * 0.01)
                    rig.engine.cancel(request.request_id)
                elif rng.random() < 0.5:
                    receiver.wait()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    for request, receiver in pairs:
        check(kit, request, receiver)
    rig.check_no_leak()
    finished = rig.engine.stats().finished
    assert sum(finished.values()) == 160
    assert finished["cancelled"] > 0


@pytest.mark.parametrize("num_pages", [16, 64])
def test_callbacks_that_submit_and_cancel(kit: Any, num_pages: int) -> None:
    """On the engine's own thread: each output may start a request and end any other one."""
    rng = np.random.default_rng(num_pages)
    rig = kit.rig(num_pages=num_pages)
    pairs: list[Any] = []

    class Meddler(kit.Receiver):  # type: ignore[misc,name-defined]
        def __call__(self, output: Any) -> None:
            super().__call__(output)
            if rng.random() < 0.2:
                rig.engine.cancel(str(rng.integers(0, len(pairs))))
            if output.final and len(pairs) < 150:
                start()

    def start() -> None:
        pairs.append((kit.random_request(rng, str(len(pairs))), Meddler()))
        rig.engine.submit(*pairs[-1])

    rig.executor.gate.clear()
    for _ in range(10):
        start()
    rig.executor.gate.set()
    for i in range(150):
        check(kit, *pairs[i])
    rig.check_no_leak()
    finished = rig.engine.stats().finished
    assert finished.keys() <= {"stop", "length", "cancelled"}
    assert finished["cancelled"] > 0


def test_failing_steps_spoil_no_other_request(kit: Any) -> None:
    rng = np.random.default_rng(0)
    rig = kit.rig(num_pages=40)
    pairs = []
    for i in range(120):
        request = kit.random_request(rng, str(i))
        pairs.append((request, rig.submit(request)))
        if i % 10 == 0:
            rig.executor.fail_next.append(RuntimeError(f"injected {i}"))
            time.sleep(0.005)
    for request, receiver in pairs:
        if receiver.wait().finish_reason != "error":
            check(kit, request, receiver)
    finished = rig.engine.stats().finished
    assert 0 < finished["error"] < 60
    rig.check_no_leak()


@pytest.mark.parametrize("drain", [False, True])
def test_close_while_clients_submit(kit: Any, drain: bool) -> None:
    rig = kit.rig()
    receivers: list[Any] = []
    stop = threading.Event()

    def client(number: int) -> None:
        rng = np.random.default_rng(number)
        for i in range(10_000):
            if stop.is_set():
                return
            try:
                receivers.append(rig.submit(kit.random_request(rng, f"{number}-{i}")))
            except ValueError:
                return

    threads = [threading.Thread(target=client, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    assert rig.engine.close(drain=drain, timeout_s=20)
    stop.set()
    for thread in threads:
        thread.join(10)
    assert len(receivers) > 3
    for receiver in receivers:
        receiver.wait(0)
    rig.check_no_leak()


def test_overhead_of_a_step(kit: Any) -> None:
    """Scheduling, sampling and delivery, without a model: far below any real step."""
    rig = kit.rig(max_batch_size=8, max_num_tokens=64, max_seq_len=512, num_pages=2048)
    vocab = kit.VOCAB
    rig.executor.step = lambda inputs: np.eye(vocab, dtype=np.float32)[inputs.logit_rows % vocab]
    start = time.perf_counter()
    receivers = [rig.submit(kit.request(str(i), max_tokens=400)) for i in range(8)]
    for receiver in receivers:
        receiver.wait()
    seconds = time.perf_counter() - start
    assert seconds / rig.engine.stats().steps < 0.01


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_engines_for_minutes(kit: Any) -> None:
    """Any limits, mixes of requests, cancellations and failing steps; `seed` names the culprit."""
    deadline, seed, requests = time.monotonic() + FUZZ_SECONDS, 0, 0
    while time.monotonic() < deadline:
        seed += 1
        rng = np.random.default_rng([77, seed])
        size, batch = (int(x) for x in rng.integers(1, [20, 12]))
        rig = kit.rig(
            tokens_per_block=size,
            num_pages=int(-(-64 // size) * rng.integers(1, 8)),
            max_num_tokens=int(rng.integers(batch, 80)),
            max_batch_size=batch,
            max_prompt_rows=int(rng.integers(1, 24)),
        )
        failing, cancelling = (float(rng.choice([0, 0, 0.1])) for _ in range(2))
        pairs = []
        for i in range(int(rng.integers(1, 60))):
            request = kit.random_request(rng, str(i))
            pairs.append((request, rig.submit(request)))
            if rng.random() < failing:
                rig.executor.fail_next.append(RuntimeError(f"injected {i}"))
            if rng.random() < cancelling:
                rig.engine.cancel(str(rng.integers(0, i + 1)))
            if rng.random() < 0.2:
                time.sleep(float(rng.random()) * 0.005)
        for request, receiver in pairs:
            reason = receiver.wait().finish_reason
            assert reason != "cancelled" or cancelling, f"seed {seed}"
            if reason != "error":
                check(kit, request, receiver)
            else:
                assert failing, f"seed {seed}: {receiver.outputs[-1]}"
        rig.check_no_leak()
        assert rig.engine.close()
        rig.executor.steps.clear()
        requests += len(pairs)
    record = {"case": {"what": "scheduler", "engines": seed}, "seconds": FUZZ_SECONDS}
    append_record("fuzz", record | {"runs": requests}, {"numpy": np.__version__})
