"""Closing the engine: under load, while a step hangs, from its own callbacks."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from m3trt.runtime import engine as engine_module
from m3trt.runtime.request import (
    EngineClosedError,
    Output,
)

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("drain", [False, True])
def test_close_under_load(kit: Any, drain: bool) -> None:
    rig = kit.rig()
    receivers = [rig.submit(kit.request(str(i), max_tokens=50)) for i in range(100)]
    assert receivers[0].first.wait(10)
    assert rig.engine.close(drain=drain)
    reasons = {receiver.wait(0).finish_reason for receiver in receivers}
    assert reasons == {"length"} if drain else "cancelled" in reasons
    rig.check_no_leak()
    with pytest.raises(EngineClosedError, match="it was closed"):
        rig.submit(kit.request())
    assert rig.engine.close()
    assert rig.executor.closed == 1


def test_close_idle_is_immediate(kit: Any) -> None:
    rig = kit.rig()
    start = time.monotonic()
    assert rig.engine.close()
    assert time.monotonic() - start < 1


@pytest.mark.parametrize("drain", [False, True])
def test_close_while_a_step_hangs(kit: Any, drain: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine_module, "CANCEL_GRACE_S", 0.1)
    rig = kit.rig()
    rig.executor.gate.clear()
    receivers = [rig.submit(kit.request(str(i))) for i in range(6)]
    assert rig.executor.entered.wait(10)
    start = time.monotonic()
    assert not rig.engine.close(drain=drain, timeout_s=0.2)
    assert time.monotonic() - start < 5
    for receiver in receivers:
        final = receiver.wait(0)
        assert final.finish_reason == "error"
        assert "closed while a step hung" in final.error
    rig.executor.gate.set()
    assert rig.engine.close()
    assert all(len(receiver.outputs) == 1 for receiver in receivers)
    assert rig.executor.closed == 1


def test_drain_that_takes_too_long_cancels(kit: Any) -> None:
    rig = kit.rig(max_seq_len=100_000, num_pages=30_000)
    receiver = rig.submit(kit.request(max_tokens=90_000))
    assert rig.engine.close(drain=True, timeout_s=0.2)
    assert receiver.wait(0).finish_reason == "cancelled"


def test_close_from_a_callback_and_twice(kit: Any) -> None:
    rig = kit.rig()
    results = []
    receiver = kit.Receiver()

    def on_output(output: Output) -> None:
        receiver(output)
        results.append(rig.engine.close())

    rig.engine.submit(kit.request(), on_output)
    assert receiver.wait().finish_reason == "cancelled"
    assert results == [False, False]
    threads = [threading.Thread(target=rig.engine.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
