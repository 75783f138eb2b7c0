"""The work of `tensorrt_llm`: one engine that serves all requests of the model in flight."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from m3trt.build.engine_dir import EngineDir
from m3trt.convert.configuration import M3Config
from m3trt.preprocess.tokenizer import Tokenizer
from m3trt.runtime.engine import EngineStats, InflightEngine, engine_limits
from m3trt.runtime.executors import create_executor
from m3trt.serve.errors import failure_of
from m3trt.serve.generation import ModelDefaults, failure_arrays, parse_request
from m3trt.serve.inflight import InflightCount
from m3trt.serve.pump import Live, Respond, ResponsePump
from m3trt.serve.sender import SafeSender
from m3trt.serve.values import Arrays, scalar


def load_engine(engine: EngineDir, executor: str, max_queue_size: int) -> InflightEngine:
    """Bind the weights of `engine` and start serving it.

    Raises:
        EngineDirError, WeightFileError, ConfigError: the directory does not fit this machine.
    """
    limits = engine_limits(engine.config, engine.build)
    tokenizer = Tokenizer.load(engine.path)
    return InflightEngine(
        create_executor(engine, executor), limits, tokenizer.token_bytes, max_queue_size
    )


def model_defaults(engine: EngineDir, exclude_input_in_output: bool) -> ModelDefaults:
    """End ids come from `generation_config.json` where there is one, else from the config."""
    config = engine.config
    return ModelDefaults(
        _end_ids(engine.path, config.eos_token_id),
        exclude_input_in_output,
        _dtype(config),
        config.vocab_size,
        config.image_token_id,
    )


def _end_ids(directory: Path, default: int) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    ids = found.get("eos_token_id")
    if ids is None:
        return (default,)
    return tuple(ids) if isinstance(ids, list) else (int(ids),)


def _dtype(config: M3Config) -> np.dtype[np.generic]:
    return np.dtype(ml_dtypes.bfloat16 if config.dtype == "bfloat16" else np.float32)


class LlmService:
    """Takes requests from Triton and answers them from the engine's callbacks.

    Errors travel in band, as tensors `_error` and `finish_reason`: an error response of a
    decoupled model that another model called would keep the server from shutting down.
    """

    def __init__(
        self,
        engine: InflightEngine,
        defaults: ModelDefaults,
        respond: Respond,
        inflight: InflightCount,
        on_stats: Callable[[EngineStats], None],
    ) -> None:
        self._engine = engine
        self._defaults = defaults
        self._respond = respond
        self._inflight = inflight
        self._ids = itertools.count()
        self._pump = ResponsePump(
            respond,
            on_cancelled=lambda live: self._cancel(live),
            on_end=lambda live: inflight.add(-1),
            on_tick=lambda: on_stats(engine.stats()),
        )

    def handle(self, arrays: Arrays, client_id: str, sender: SafeSender) -> None:
        """Start a request, or with `stop` cancel those of the same request id.

        Returns at once; `sender` gets its final response later.
        """
        if scalar(arrays, "stop", False):
            self._stop(client_id)
            sender.finish()
            return
        live = Live(f"{next(self._ids)}", client_id, sender)
        self._inflight.add(1)
        try:
            request, live.delivery = parse_request(arrays, live.request_id, self._defaults)
            self._pump.add(live)
            self._engine.submit(request, lambda output: self._pump.put(live, output))
        except Exception as error:
            self._pump.drop(live)
            sender.send(self._respond(failure_arrays(failure_of(error))), final=True)
            self._inflight.add(-1)

    def close(self) -> None:
        """Cancel what runs and release the engine."""
        self._engine.close()
        self._pump.close()

    def _stop(self, client_id: str) -> None:
        for live in self._pump.live():
            if client_id and live.client_id == client_id:
                self._cancel(live)

    def _cancel(self, live: Live) -> None:
        self._engine.cancel(live.request_id)
