"""The engine that serves: one thread that runs many requests in flight on a step executor."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
from m3trt.build.configuration import BuildConfig
from m3trt.convert.configuration import M3Config
from m3trt.runtime.cache import PagePool
from m3trt.runtime.request import (
    EngineClosedError,
    EngineLimits,
    GenerationRequest,
    Output,
    QueueFullError,
    RequestError,
    check_request,
)
from m3trt.runtime.scheduler import Scheduler, Step
from m3trt.runtime.sequence import Sequence
from m3trt.runtime.step import StepExecutor

logger = logging.getLogger(__name__)

OnOutput = Callable[[Output], None]

CANCEL_GRACE_S = 10.0
"""How long `close` waits for a running step after it gave up draining."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for metrics.

    `waiting`: queued requests; `active`: admitted ones, `context` + `generation`; `max_requests`:
    most that can be active. `context_tokens`: prompt tokens of the last step. `steps` and totals
    count since the start, `finished` by finish reason. `alive` is
    False once the engine is closed or broken.
    """

    waiting: int
    active: int
    context: int
    generation: int
    max_requests: int
    context_tokens: int
    steps: int
    pages_max: int
    pages_used: int
    pages_free: int
    tokens_per_page: int
    total_input_tokens: int
    total_output_tokens: int
    finished: dict[str, int]
    alive: bool


class InflightEngine:
    """Runs requests in flight. All methods may be called from any thread.

    `token_bytes(id)` gives the raw bytes of a token, for stop words; it must take any id below
    vocab_size. At most `max_queue_size` requests wait beyond the `max_batch_size` that can run.
    The engine owns `executor` and closes it.
    """

    def __init__(
        self,
        executor: StepExecutor,
        limits: EngineLimits,
        token_bytes: Callable[[int], bytes],
        max_queue_size: int = 1024,
    ) -> None:
        self._executor = executor
        self._limits = limits
        self._token_bytes = token_bytes
        self._max_requests = limits.max_batch_size + max_queue_size
        self._pool = PagePool(executor.num_pages, limits.tokens_per_block)
        # Only the engine's thread touches the scheduler's state; the rest is under the lock.
        self._scheduler = Scheduler(limits, self._pool)
        self._wake = threading.Condition()
        self._running: dict[str, Sequence] = {}
        self._arrived: list[Sequence] = []
        self._cancelled: list[Sequence] = []
        self._closed = ""
        self._drain = False
        self._steps = 0
        self._context_tokens = 0
        self._input_tokens = 0
        self._output_tokens = 0
        self._finished: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="m3-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(
        cls,
        engine_dir: Path,
        token_bytes: Callable[[int], bytes],
        runtime: str = "auto",
        num_pages: int | None = None,
        max_queue_size: int = 1024,
    ) -> InflightEngine:
        """Load an engine directory and start to serve it.

        `runtime` and `num_pages` are those of `executors.create_executor`.

        Raises:
            EngineDirError, WeightFileError, ValueError: as `create_executor`.
        """
        from m3trt.build.engine_dir import EngineDir
        from m3trt.runtime.executors import create_executor

        engine = EngineDir.load(engine_dir)
        executor = create_executor(engine, runtime, num_pages)
        limits = engine_limits(engine.config, engine.build)
        return cls(executor, limits, token_bytes, max_queue_size)

    # ---- any thread -----------------------------------------------------------------------

    def submit(self, request: GenerationRequest, on_output: OnOutput) -> None:
        """Queue `request`; `on_output` is called on the engine's thread, so it must be quick.

        An accepted request gets any number of outputs and exactly one final one, unless
        `on_output` raises: then it is dropped.

        Raises:
            RequestError: the request can never run here (text for the caller).
            QueueFullError, EngineClosedError: not now.
        """
        check_request(request, self._limits)
        self._scheduler.check_fits(request)
        sequence = Sequence(request, self._limits.vocab_size, self._token_bytes, on_output)
        with self._wake:
            if self._closed:
                raise EngineClosedError(f"the engine takes no more requests: {self._closed}")
            if request.request_id in self._running:
                raise RequestError(
                    f"request id {request.request_id!r} is in use, expected a new one: wait for"
                    " that request's final response or cancel it"
                )
            if len(self._running) >= self._max_requests:
                raise QueueFullError(
                    f"{len(self._running)} requests run or wait, which is the most allowed:"
                    " try again later"
                )
            self._running[request.request_id] = sequence
            self._arrived.append(sequence)
            self._wake.notify()

    def cancel(self, request_id: str) -> bool:
        """End a request early; its final output has finish reason "cancelled".

        Returns False when no such request is running: it may just have finished.
        """
        with self._wake:
            sequence = self._running.get(request_id)
            if sequence is None:
                return False
            self._cancelled.append(sequence)
            self._wake.notify()
            return True

    def stats(self) -> EngineStats:
        with self._wake:
            active = tuple(self._scheduler.active)
            context = sum(not sequence.decoding for sequence in active)
            used = self._pool.used
            return EngineStats(
                waiting=max(0, len(self._running) - len(active)),
                active=len(active),
                context=context,
                generation=len(active) - context,
                max_requests=self._limits.max_batch_size,
                context_tokens=self._context_tokens,
                steps=self._steps,
                pages_max=self._pool.num_pages,
                pages_used=used,
                pages_free=self._pool.num_pages - used,
                tokens_per_page=self._pool.tokens_per_page,
                total_input_tokens=self._input_tokens,
                total_output_tokens=self._output_tokens,
                finished=dict(self._finished),
                alive=not self._closed,
            )

    def close(self, drain: bool = False, timeout_s: float = 30.0) -> bool:
        """Take no more requests, finish (`drain`) or cancel the rest, release the executor.

        Waits at most `timeout_s`, and after a drain that took too long CANCEL_GRACE_S more. Every
        request has had its final output when it returns. False: a step or callback still hangs;
        the executor is released once it comes back. Called from a callback it only starts the
        end and returns False.
        """
        with self._wake:
            self._closed = self._closed or "it was closed"
            self._drain = drain
            self._wake.notify()
        if threading.current_thread() is self._thread:
            return False
        self._thread.join(timeout_s)
        if drain and self._thread.is_alive():
            with self._wake:
                self._drain = False
                self._wake.notify()
            self._thread.join(CANCEL_GRACE_S)
        if self._thread.is_alive():
            logger.error("a step or callback hangs: its requests are given up")
            self._fail_all("the engine was closed while a step hung")
        return not self._thread.is_alive()

    # ---- the engine's thread --------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_orders():
                step = self._scheduler.plan()
                if step is not None:
                    self._run_step(step)
        except BaseException as error:  # of SystemExit too, or the engine would look alive
            logger.exception("the scheduler failed: the engine ends")
            with self._wake:
                self._closed = f"its scheduler failed with {error!r}: restart it"
            self._fail_all(f"the engine failed: {error!r}")
        finally:
            try:
                self._executor.close()
            except Exception:
                logger.exception("the executor could not be closed")

    def _take_orders(self) -> bool:
        """Wait for something to do, take arrivals and cancellations; False at the end."""
        with self._wake:
            self._wake.wait_for(
                lambda: self._arrived or self._cancelled or self._closed or not self._scheduler.idle
            )
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
            if self._closed and not self._drain:
                cancelled = list(self._running.values())
            for sequence in arrived:
                self._scheduler.add(sequence)
            ended = bool(self._closed) and not self._running
        for sequence in cancelled:
            if self._is_running(sequence):
                self._finish(sequence, sequence.finish("cancelled"))
        return not ended

    def _run_step(self, step: Step) -> None:
        sequences = [chunk.sequence for chunk in step.chunks]
        asking = [chunk.sequence for chunk in step.chunks if chunk.wants_logits]
        expected = (len(asking), self._limits.vocab_size)
        try:
            logits = self._executor.step(step.inputs)
            if logits.shape != expected:
                raise RuntimeError(f"logits have shape {logits.shape}, expected {expected}")
        except Exception as error:
            logger.exception("a step of %d requests failed", len(sequences))
            for sequence in sequences:
                self._finish(sequence, sequence.finish("error", f"the step failed: {error}"))
            return
        self._scheduler.commit(step)
        self._steps += 1
        self._context_tokens = step.context_tokens
        self._input_tokens += step.context_tokens
        self._output_tokens += len(asking)
        for sequence, row in zip(asking, logits, strict=True):
            self._append(sequence, row)

    def _append(self, sequence: Sequence, logits: npt.NDArray[np.float32]) -> None:
        try:
            output = sequence.append(logits)
        except Exception as error:
            logger.exception("request %r failed", sequence.request.request_id)
            output = sequence.finish("error", f"no token could be chosen: {error}")
        if output is None:
            return
        if output.final:
            self._finish(sequence, output)
        elif self._is_running(sequence) and not self._deliver(sequence, output):
            self._scheduler.remove(sequence)
            self._forget(sequence, "error")

    def _finish(self, sequence: Sequence, output: Output) -> None:
        """Free everything the request holds, then deliver its final output."""
        self._scheduler.remove(sequence)
        if self._forget(sequence, output.finish_reason or "error"):
            self._deliver(sequence, output)

    def _forget(self, sequence: Sequence, reason: str) -> bool:
        """Take the right to deliver the final output; False if somebody else has it."""
        with self._wake:
            if not self._is_running(sequence):
                return False
            del self._running[sequence.request.request_id]
            self._finished[reason] += 1
            return True

    def _is_running(self, sequence: Sequence) -> bool:
        return self._running.get(sequence.request.request_id) is sequence

    def _deliver(self, sequence: Sequence, output: Output) -> bool:
        try:
            sequence.on_output(output)
        except BaseException:  # whatever a receiver does, the other requests go on
            logger.exception("the receiver of request %r failed", output.request_id)
            return False
        return True

    def _fail_all(self, message: str) -> None:
        """Final outputs for all requests, without touching state of a thread that may hang."""
        for sequence in list(self._running.values()):
            if self._forget(sequence, "error"):
                output = Output(
                    sequence.request.request_id,
                    new_ids=(),
                    finish_reason="error",
                    error=message,
                    num_input_tokens=sequence.prompt_length,
                    num_output_tokens=sequence.num_generated,
                )
                self._deliver(sequence, output)


def engine_limits(config: M3Config, build: BuildConfig) -> EngineLimits:
    """What requests and steps of an engine must keep to."""
    return EngineLimits(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        dtype=np.dtype(ml_dtypes.bfloat16 if config.dtype == "bfloat16" else np.float32),
        tokens_per_block=config.tokens_per_block,
        max_batch_size=build.max_batch_size,
        max_num_tokens=build.max_num_tokens,
        max_seq_len=build.max_seq_len,
        max_prompt_rows=build.max_multimodal_len,
    )
