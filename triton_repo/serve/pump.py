"""Carries outputs from the engine's thread to Triton's response senders.

Sending takes longer than a step may wait, so it happens on a thread of its own. While that thread
is behind, successive outputs of a request become one response.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from m3trt.runtime.request import Output
from m3trt.serve.generation import Delivery, merge, output_arrays
from m3trt.serve.sender import SafeSender

logger = logging.getLogger(__name__)

Respond = Callable[[dict[str, Any]], Any]
"""Makes a Triton response of arrays by name."""


class Live:
    """A request that runs: the engine's id for it and where its outputs go."""

    def __init__(self, request_id: str, client_id: str, sender: SafeSender) -> None:
        self.request_id = request_id
        self.client_id = client_id
        self.sender = sender
        self.delivery = Delivery()
        self.started = False


class ResponsePump:
    """One thread that sends responses, notices cancellations and calls `on_tick`."""

    def __init__(
        self,
        respond: Respond,
        on_cancelled: Callable[[Live], None],
        on_end: Callable[[Live], None],
        on_tick: Callable[[], None],
        tick_s: float = 0.1,
    ) -> None:
        """
        Args:
            on_cancelled: the client of a request is gone; called at every tick until its end.
            on_end: the last response of a request was sent.
            on_tick: called about every `tick_s`.
        """
        self._respond = respond
        self._on_cancelled = on_cancelled
        self._on_end = on_end
        self._on_tick = on_tick
        self._tick_s = tick_s
        self._queue: queue.SimpleQueue[tuple[Live, Output] | None] = queue.SimpleQueue()
        self._live: dict[str, Live] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="m3-responses", daemon=True)
        self._thread.start()

    def add(self, live: Live) -> None:
        """Watch `live` for cancellation until its final output was sent or `drop`."""
        with self._lock:
            self._live[live.request_id] = live

    def drop(self, live: Live) -> None:
        with self._lock:
            self._live.pop(live.request_id, None)

    def put(self, live: Live, output: Output) -> None:
        """Queue an output; never blocks."""
        self._queue.put((live, output))

    def live(self) -> list[Live]:
        with self._lock:
            return list(self._live.values())

    def close(self) -> None:
        """Send what is queued, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        next_tick = time.monotonic()
        running = True
        while running:
            running = self._send_queued(max(0.0, next_tick - time.monotonic()))
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + self._tick_s
                self._tick()

    def _send_queued(self, timeout_s: float) -> bool:
        """Send everything that waits; False at the end of all."""
        merged: dict[str, tuple[Live, Output]] = {}
        running = True
        try:
            item = self._queue.get(timeout=timeout_s)
            while item is not None:
                live, output = item
                before = merged.get(live.request_id)
                merged[live.request_id] = (live, merge(before[1], output) if before else output)
                item = self._queue.get_nowait()
            running = False
        except queue.Empty:
            pass
        for live, output in merged.values():
            self._send(live, output)
        return running

    def _send(self, live: Live, output: Output) -> None:
        try:
            try:
                arrays = output_arrays(output, live.delivery, first=not live.started)
                live.started = True
                live.sender.send(self._respond(arrays), final=output.final)
            finally:
                if output.final:
                    live.sender.finish()
        except Exception:
            logger.exception("a response of request %s could not be sent", live.request_id)
        if output.final:
            self.drop(live)
            self._on_end(live)

    def _tick(self) -> None:
        try:
            for live in self.live():
                if live.sender.cancelled():
                    self._on_cancelled(live)
            self._on_tick()
        except Exception:
            logger.exception("watching requests failed")
