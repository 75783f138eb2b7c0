"""Killed processes under load: the server answers again, and leaves nothing behind at the end."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from m3trt.serve.inflight import read_count

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def victim(
    start_server: Callable[..., Any], engine_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A server of its own to kill; the last thing it has to do is to stop cleanly. Its supervisor
    sends no health request that would count as one in flight."""
    flags = ["--probe_period", "600", "--set", "allowed_media_hosts=127.0.0.1"]
    server = start_server(engine_dir, tmp_path_factory.mktemp("victim"), *flags)
    yield server
    assert server.stop(signal.SIGTERM) == 0
    assert server.leftovers() == []


class Load:
    """Clients that ask both entries all the time and note when they got what."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._stop = threading.Event()
        self.good: list[float] = []
        self.errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(model, i))
            for model in ("ensemble", "tensorrt_llm_bls")
            for i in range(2)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        try:
            self.wait_for_answers(4)
        except BaseException:
            self._stop.set()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads), "a client waits for ever"

    def wait_for_answers(self, count: int, since: float | None = None) -> None:
        """Wait for `count` right answers to requests that were sent from `since` on."""
        since = time.monotonic() if since is None else since
        deadline = time.monotonic() + 60
        while sum(sent >= since for sent in list(self.good)) < count:
            assert time.monotonic() < deadline, (self.errors[-3:], self._server.log)
            time.sleep(0.05)

    def _ask(self, model: str, number: int) -> None:
        while not self._stop.is_set():
            sent = time.monotonic()
            try:
                reply = self._server.generate(
                    model, timeout=45, text_input=f"{number}", max_tokens=12
                )
            except OSError as error:
                self.errors.append(repr(error))
                time.sleep(0.1)
                continue
            if reply.error:
                self.errors.append(reply.error)
                assert "timed out" not in reply.error
                time.sleep(0.1)
            else:
                assert reply.text
                self.good.append(sent)


@pytest.mark.parametrize(
    "model",
    ["preprocessing", "multimodal_encoders", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls"],
)
def test_a_killed_model_process_under_load(victim: Any, model: str) -> None:
    with Load(victim) as load:
        old = victim.model_pid(model)
        os.kill(old, signal.SIGKILL)
        killed = time.monotonic()
        load.wait_for_answers(8, since=killed + 1)
    assert victim.model_pid(model) != old
    assert victim.process.poll() is None


@pytest.fixture
def slow_pictures() -> Iterator[str]:
    """URL of a picture that does not come before the end of the test."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/picture.png"


def test_pictures_that_do_not_come(victim: Any, slow_pictures: str) -> None:
    """They hold up nobody else; when their process dies, nobody waits for ever."""
    models = ("ensemble", "tensorrt_llm_bls")
    expected = victim.generate().text

    def ask(model: str) -> str:
        try:
            return str(victim.generate(model, image_url_input=slow_pictures).error)
        except OSError as error:
            return repr(error)

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, model) for model in models * 4]
        time.sleep(0.5)
        assert [victim.generate(model, timeout=20).text for model in models] == [expected] * 2
        assert not any(future.done() for future in asking)
        os.kill(victim.model_pid("preprocessing"), signal.SIGKILL)
        assert all(future.result(timeout=20) for future in asking)
    wait_for_answer(victim)


def wait_for_answer(server: Any) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            if "text_output" in server.generate().body:
                return
        except OSError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.2)


def wait_until_idle(server: Any, model: str) -> None:
    """Until the supervisor has had the answer to its own first request, and the process has counted
    the last one as ended. Clients have their answers before either."""
    state, count = server.run_dir / "server.json", server.run_dir / "inflight" / model
    assert count.exists()
    deadline = time.monotonic() + 30
    while int(json.loads(state.read_text())["pid"]) != server.server_pid() or read_count(count):
        assert time.monotonic() < deadline, server.log
        time.sleep(0.01)


def test_an_idle_model_process_is_reloaded_without_a_restart(victim: Any) -> None:
    wait_until_idle(victim, "tensorrt_llm")
    server, old = victim.server_pid(), victim.model_pid("tensorrt_llm")
    os.kill(old, signal.SIGKILL)
    wait_for_answer(victim)
    assert victim.model_pid("tensorrt_llm") != old
    assert victim.server_pid() == server, victim.log


def test_a_killed_server_under_load(victim: Any) -> None:
    with Load(victim) as load:
        old = victim.server_pid()
        stubs = [victim.model_pid(model) for model in ("tensorrt_llm", "tensorrt_llm_bls")]
        os.kill(old, signal.SIGKILL)
        load.wait_for_answers(8, since=time.monotonic())
    assert load.errors
    assert victim.server_pid() != old
    state = json.loads((victim.run_dir / "server.json").read_text())
    assert int(state["pid"]) == victim.server_pid()
    assert not any(Path(f"/proc/{pid}").exists() for pid in [old, *stubs])


def test_a_supervisor_that_is_killed_takes_the_server_with_it(
    start_server: Callable[..., Any], engine_dir: Path, tmp_path: Path
) -> None:
    server = start_server(engine_dir, tmp_path)
    server.process.kill()
    server.process.wait()
    deadline = time.monotonic() + 20
    while server.leftovers():
        assert time.monotonic() < deadline, server.leftovers()
        time.sleep(0.2)
