"""Clients that go away: their pages are freed at once, and the server can still stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.full

LONG = 700


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def idle(server: Any) -> bool:
    return bool(server.metric("used") == 0 and server.metric("active") == 0)


def test_cancelling_a_stream_frees_its_pages(server: Any) -> None:
    assert wait_until(lambda: idle(server), 20)
    before = server.metric("output")
    answer = server.stream("tensorrt_llm_bls", cancel_after=3, max_tokens=LONG)
    assert len(answer.pieces) == 3
    assert wait_until(lambda: idle(server), 10)
    assert server.metric("output") - before < LONG - 100


def test_an_http_client_that_disconnects_frees_its_pages(server: Any) -> None:
    assert wait_until(lambda: idle(server), 20)
    before = server.metric("output")
    with server.open("tensorrt_llm_bls/generate_stream", 30, stream=True, max_tokens=LONG) as http:
        assert http.readline().startswith(b"data:")
    assert wait_until(lambda: idle(server), 10)
    assert server.metric("output") - before < LONG - 100


def test_stop_with_the_same_request_id_ends_an_engine_request(server: Any) -> None:
    """The way to cancel a request that came through the ensemble."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        request = {"id": "to be stopped", "max_tokens": LONG}
        running = pool.submit(server.generate_stream, "ensemble", **request)
        assert wait_until(lambda: server.metric("active") == 1, 10)
        server.stop_request("to be stopped")
        events = running.result(timeout=10)
    assert events[-1]["finish_reason"] == "cancelled"
    assert len(events) < LONG - 100


def test_cancelling_the_ensemble_leaks_nothing(server: Any) -> None:
    """The engine runs to the end, as the server does not tell it."""
    answer = server.stream("ensemble", cancel_after=2, max_tokens=100)
    assert len(answer.pieces) == 2
    assert wait_until(lambda: idle(server), 30)
    assert server.generate("ensemble").text


def test_a_storm_of_cancellations(server: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    random = np.random.default_rng(0)
    with ThreadPoolExecutor(8) as pool:
        storm = [
            pool.submit(server.stream, "tensorrt_llm_bls", cancel_after=int(n), max_tokens=LONG)
            for n in random.integers(1, 6, size=40)
        ]
    assert all(stream.result().pieces for stream in storm)
    assert wait_until(lambda: idle(server), 20)
    assert server.generate("tensorrt_llm_bls").text == server.generate("ensemble").text
