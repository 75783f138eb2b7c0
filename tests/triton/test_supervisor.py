"""What the supervisor decides, with a server that only pretends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from m3trt.serve import server as server_module
from m3trt.serve import supervisor as module
from m3trt.serve.api import ApiError
from m3trt.serve.binary import ServeError
from m3trt.serve.inflight import InflightCount
from m3trt.serve.ports import Ports
from m3trt.serve.server import ServerOptions, TritonServer
from m3trt.serve.supervisor import Interrupted, Supervisor

pytestmark = pytest.mark.smoke


class FakeServer:
    """Counts what is done to it; `probe`, `missing` and `starts` say how it behaves."""

    def __init__(self, options: Any) -> None:
        self.pid = 1
        self.options = SimpleNamespace(ready_timeout_s=0.2, api=self)
        self.calls: list[str] = []
        self.code: int | None = None
        self.missing: list[str] = []
        self.probe_error: Exception | None = None
        self.starts = 1000
        self.counter: float | None = 0.0
        self.ready = True

    def start(self) -> None:
        self.calls.append("start")
        self.code = self.probe_error = None

    def check_ready(self) -> bool:
        if self.calls.count("start") > self.starts:
            raise ServeError("it ended")
        return self.ready

    def tail(self) -> str:
        return ""

    def write_state(self) -> None:
        pass

    def find_processes(self) -> None:
        self.missing = []

    def exit_code(self) -> int | None:
        return self.code

    def missing_models(self, expected: list[str]) -> list[str]:
        return self.missing

    def reload(self, model: str, timeout_s: float) -> None:
        self.calls.append(f"reload {model}")
        if model == "preprocessing":
            raise ApiError("it does not load")

    def kill(self) -> None:
        self.calls.append("kill")

    def stop(self) -> None:
        self.calls.append("stop")

    def probe(self, model: str, timeout_s: float) -> None:
        if self.probe_error is not None:
            raise self.probe_error

    def steps(self) -> float | None:
        return self.counter


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    """watched(change) -> what the supervisor did after `change(server)`; "gave up" at the end."""
    monkeypatch.setattr(module, "TritonServer", FakeServer)
    monkeypatch.setattr(module, "TICK_S", 0.01)
    monkeypatch.setattr(module, "MAX_BACKOFF_S", 0.01)

    def watch(
        change: Callable[[FakeServer], None],
        stuck: str = "",
        until: Callable[[FakeServer], bool] = lambda server: bool(server.calls),
    ) -> list[str]:
        stop = threading.Event()
        models = ["tensorrt_llm", "preprocessing"]
        supervisor = Supervisor(None, models, tmp_path, stop, probe_period_s=0.0)  # type: ignore
        supervisor.start()
        server: Any = supervisor.server
        server.calls.clear()
        if stuck:
            InflightCount(tmp_path / stuck).add(2)
        change(server)
        deadline = time.monotonic() + 0.5
        try:
            supervisor.watch(until=lambda: until(server) or time.monotonic() > deadline)
        except ServeError:
            server.calls.append("gave up")
        supervisor.close()
        calls: list[str] = server.calls[:-1] if server.calls[-1] == "stop" else server.calls
        return calls

    return watch


def set_(**values: Any) -> Callable[[FakeServer], None]:
    return lambda server: server.__dict__.update(values)


RESTART = ["kill", "start"]


def test_a_healthy_server_is_left_alone(watched: Callable[..., list[str]]) -> None:
    assert watched(set_()) == []


def test_a_dead_server_is_restarted(watched: Callable[..., list[str]]) -> None:
    assert watched(set_(code=-9)) == RESTART


def test_a_dead_model_is_reloaded_unless_clients_would_wait_for_ever(
    watched: Callable[..., list[str]],
) -> None:
    dead = set_(missing=["tensorrt_llm"])
    assert watched(dead) == ["reload tensorrt_llm"]
    assert watched(dead, stuck="tensorrt_llm") == RESTART


def test_a_process_that_died_before_it_was_looked_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ServerOptions(tmp_path, tmp_path, "127.0.0.1", Ports(1, 2, 3), 1.0)
    server = TritonServer(options)
    monkeypatch.setattr(server_module, "model_processes", lambda group, path: {1: "a"})
    monkeypatch.setattr(server_module, "is_member", lambda pid, group: True)
    server.find_processes()
    assert server.missing_models(["a"]) == []
    assert server.missing_models(["a", "b"]) == ["b"]


def test_a_model_that_does_not_load_again(watched: Callable[..., list[str]]) -> None:
    assert watched(set_(missing=["preprocessing"])) == ["reload preprocessing", *RESTART]


def test_health_requests(watched: Callable[..., list[str]]) -> None:
    unhealthy = ApiError("500 Stub process 'tensorrt_llm_0_0' is not healthy.")
    assert watched(set_(probe_error=unhealthy)) == ["reload tensorrt_llm"]
    assert watched(set_(probe_error=ApiError("500 the step failed"))) == RESTART
    assert watched(set_(probe_error=ApiError("503 try again later", status=503))) == []
    still = ApiError("timed out", timed_out=True)
    assert watched(set_(probe_error=still)) == RESTART
    assert watched(set_(probe_error=still, counter=None)) == RESTART


def test_a_busy_server_is_no_dead_one(watched: Callable[..., list[str]]) -> None:
    def busy(server: FakeServer) -> None:
        def steps() -> float:
            return time.monotonic()

        server.steps = steps  # type: ignore[method-assign]
        server.probe_error = ApiError("timed out", timed_out=True)

    assert watched(busy) == []


def test_giving_up(watched: Callable[..., list[str]]) -> None:
    calls = watched(set_(code=1, starts=0))
    assert calls == [*RESTART * module.MAX_FAILED_STARTS, "gave up"]


def test_giving_up_after_a_long_good_run(
    watched: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STABLE_S", -1.0)
    calls = watched(set_(code=1, starts=0))
    assert calls == [*RESTART * module.MAX_FAILED_STARTS, "gave up"]


def test_crashes_of_a_server_that_always_comes_back(
    watched: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that crash it again and again must not end it for ever."""
    monkeypatch.setattr(module, "MAX_FAILED_STARTS", 1)

    def crash_twice(server: FakeServer) -> None:
        server.code = -11
        start = server.start

        def crash_again() -> None:
            start()
            server.code = -11 if server.calls.count("start") < 3 else None

        server.start = crash_again  # type: ignore[method-assign]

    assert (
        watched(crash_twice, until=lambda server: server.calls.count("start") == 3) == RESTART * 3
    )


def test_a_server_that_is_never_ready(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "TritonServer", FakeServer)
    stop = threading.Event()
    supervisor = Supervisor(None, [], tmp_path, stop)  # type: ignore[arg-type]
    supervisor.server.ready = False  # type: ignore[attr-defined]
    with pytest.raises(ServeError, match="not ready after"):
        supervisor.start()
    stop.set()
    with pytest.raises(Interrupted):
        supervisor.start()
