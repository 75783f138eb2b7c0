"""Keeps one server answering: reloads dead models, restarts a dead server, leaves nothing behind.

Triton reports ready whatever happens to its model processes, so health is judged by what lives and
by real requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from m3trt.serve.api import ApiError
from m3trt.serve.binary import ServeError
from m3trt.serve.inflight import read_count
from m3trt.serve.server import ENTRIES, ServerOptions, TritonServer

logger = logging.getLogger(__name__)

TICK_S = 0.25
MAX_BACKOFF_S = 30.0
STABLE_S = 60.0
"""A run of this length ends the series of failures that the backoff grows with."""

MAX_FAILED_STARTS = 8
RELOAD_TIMEOUT_S = 300.0


class Interrupted(Exception):
    """Somebody asked for the end while the server started."""


class Supervisor:
    """Runs `TritonServer` until `stop` is set."""

    def __init__(
        self,
        options: ServerOptions,
        processes: Sequence[str],
        state_dir: Path,
        stop: threading.Event,
        probe_period_s: float = 10.0,
        probe_timeout_s: float = 60.0,
    ) -> None:
        """
        Args:
            processes: names of the models that have processes.
            state_dir: where models that answer later count their requests in flight.
        """
        self.server = TritonServer(options)
        self._processes = list(processes)
        self._state_dir = state_dir
        self._stop = stop
        self._probe_period_s = probe_period_s
        self._probe_timeout_s = probe_timeout_s
        self._failures = 0
        self._started = 0.0
        self._calls = ThreadPoolExecutor(4, thread_name_prefix="m3-call")
        self._probe: Future[None] | None = None
        self._next_probe = 0.0
        self._steps: float | None = None

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            ServeError: it does not.
            Interrupted: `stop` was set.
        """
        self.server.start()
        limit = self.server.options.ready_timeout_s
        deadline = time.monotonic() + limit
        self._wait(self.server.check_ready, deadline)
        first = self._calls.submit(self._ask, limit)
        self._wait(lambda: first.done() or not self.server.check_ready(), deadline)
        if not first.done() or first.exception() is not None:
            error = first.exception() if first.done() else "the server is no longer ready"
            raise ServeError(f"the first request failed: {error}{self.server.tail()}")
        self._started = time.monotonic()
        self.server.find_processes()
        self.server.write_state()
        self._schedule_probe()

    def _wait(self, condition: Callable[[], bool], deadline: float) -> None:
        while not condition():
            if self._stop.wait(0.1):
                raise Interrupted
            if time.monotonic() > deadline:
                raise ServeError(
                    f"the server was not ready after {self.server.options.ready_timeout_s:g} s"
                    f" (--ready_timeout){self.server.tail()}"
                )

    def watch(self, until: Callable[[], bool] = lambda: False) -> None:
        """Supervise until `stop` is set or `until` says so.

        Raises:
            ServeError: the server cannot be kept running.
        """
        while not self._stop.wait(TICK_S) and not until():
            try:
                self._tick()
            except Interrupted:
                return

    def close(self) -> None:
        """Stop the server and clean up; takes some seconds."""
        logger.info("stopping")
        self.server.stop()
        self._calls.shutdown(wait=False, cancel_futures=True)

    def _tick(self) -> None:
        code = self.server.exit_code()
        if code is not None:
            self._restart(f"the server process ended with code {code}")
        elif dead := self.server.missing_models(self._processes):
            self._replace(dead)
        elif self._probe is not None and self._probe.done():
            self._judge(self._probe)
        elif self._probe is None and time.monotonic() >= self._next_probe:
            self._probe = self._calls.submit(self._ask, self._probe_timeout_s)

    def _ask(self, timeout_s: float) -> None:
        for model in ENTRIES:
            self.server.options.api.probe(model, timeout_s)

    def _judge(self, probe: Future[None]) -> None:
        """A probe that timed out while the engine stepped on only says that the server is busy."""
        steps, before = self.server.options.api.steps(), self._steps
        self._schedule_probe()
        self._steps = steps
        error = probe.exception()
        if error is None:
            if time.monotonic() - self._started > STABLE_S:
                self._failures = 0
            return
        if not isinstance(error, ApiError):
            raise error
        if error.dead_model:
            self._replace([error.dead_model])
        elif error.timed_out and steps is not None:
            if steps == before:
                self._restart(f"the engine stands still: {error}")
        elif not error.busy:
            self._restart(f"a health request failed: {error}")

    def _replace(self, models: list[str]) -> None:
        """Reload models whose processes died. Requests that one held beyond `execute` would never
        be answered by this server; then it is restarted, which closes their connections."""
        stuck = sum(read_count(self._state_dir / model) for model in models)
        if stuck:
            self._restart(f"process of {models} died with {stuck} requests in flight")
            return
        logger.warning("process of %s died: reloading", models)
        reload = self._calls.submit(self._reload, models)
        while not reload.done():
            if self._stop.wait(0.1):
                raise Interrupted
        if (error := reload.exception()) is not None:
            self._restart(f"{models} could not be reloaded: {error}")
            return
        self.server.find_processes()
        logger.info("reloaded %s", models)
        self._schedule_probe()

    def _reload(self, models: list[str]) -> None:
        for model in models:
            self.server.reload(model, RELOAD_TIMEOUT_S)

    def _restart(self, reason: str) -> None:
        """Start a new server; pauses grow while servers live short.

        Raises:
            ServeError: `MAX_FAILED_STARTS` in a row did not get it to answer.
            Interrupted: `stop` was set.
        """
        if time.monotonic() - self._started > STABLE_S:
            self._failures = 0
        for _ in range(MAX_FAILED_STARTS):
            pause = min(MAX_BACKOFF_S, 0.25 * 2 ** min(self._failures, 10))
            self._failures += 1
            logger.error("%s: restarting in %g s", reason, pause)
            self.server.kill()
            if self._stop.wait(pause):
                raise Interrupted
            try:
                self.start()
            except ServeError as error:
                reason = str(error)
                continue
            logger.info("the server answers again (process %d)", self.server.pid)
            return
        raise ServeError(f"giving up after {MAX_FAILED_STARTS} failed starts: {reason}")

    def _schedule_probe(self) -> None:
        self._probe = None
        self._next_probe = time.monotonic() + self._probe_period_s
