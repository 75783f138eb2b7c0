"""The engine that serves: one thread that runs many requests in flight on a step executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from m3trt.runtime.request import EngineLimits, GenerationRequest, Output
from m3trt.runtime.step import StepExecutor

OnOutput = Callable[[Output], None]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for metrics.

    `waiting`: queued requests; `active`: admitted ones, `context` + `generation`; `max_requests`:
    most that can be active. `context_tokens`: prompt tokens of the last step. Totals count since
    the start; `finished` by finish reason.
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

    `token_bytes(id)` gives the raw bytes of a token, for stop words.
    """

    def __init__(
        self,
        executor: StepExecutor,
        limits: EngineLimits,
        token_bytes: Callable[[int], bytes],
        max_queue_size: int = 1024,
    ) -> None:
        raise NotImplementedError

    @classmethod
    def load(
        cls,
        engine_dir: Path,
        token_bytes: Callable[[int], bytes],
        runtime: str = "auto",
        max_queue_size: int = 1024,
    ) -> InflightEngine:
        """Load an engine directory and start serving it."""
        raise NotImplementedError

    def submit(self, request: GenerationRequest, on_output: OnOutput) -> None:
        """Queue `request`; `on_output` is called on the engine's thread, so it must be quick.

        An accepted request gets any number of outputs and exactly one final one. If `on_output`
        raises, the request is dropped.

        Raises:
            RequestError: the request can never run here (text for the caller).
            QueueFullError, EngineClosedError: not now.
        """
        raise NotImplementedError

    def cancel(self, request_id: str) -> bool:
        """End a request early; its final output has finish reason "cancelled".

        Returns False when no such request is running: it may just have finished.
        """
        raise NotImplementedError

    def stats(self) -> EngineStats:
        raise NotImplementedError

    def close(self, drain: bool = False, timeout_s: float = 30.0) -> bool:
        """Take no more requests, finish (`drain`) or cancel the rest, release the executor.

        Returns within about `timeout_s`; False if a step still hangs then. Every request has had
        its final output by then.
        """
        raise NotImplementedError
