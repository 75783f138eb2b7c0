"""The work of `tensorrt_llm_bls`: the ensemble's pipeline as a program, and cancellable.

Cancellation does not cross an ensemble, nor a call from model to model. So each engine call gets a
secret id, and a second call with `stop` and that id ends it.
"""

from __future__ import annotations

import logging
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from m3trt.preprocess.detokenizer import Detokenizer
from m3trt.serve.backend import (
    Arrays,
    CallError,
    call,
    drop_streams,
    error_response,
    response_of,
    stream,
)
from m3trt.serve.errors import RequestFailure, failure_of
from m3trt.serve.inflight import InflightCount
from m3trt.serve.prompts import refuse_unsupported
from m3trt.serve.sender import SafeSender
from m3trt.serve.table import routes
from m3trt.serve.texts import failure_in, postprocess
from m3trt.serve.values import text

logger = logging.getLogger(__name__)

ENGINE = "tensorrt_llm"
WATCH_S = 0.1


class Cancelled(Exception):
    """The client has gone."""


class Job:
    """One request: `key` is the engine's id for it."""

    def __init__(self, arrays: Arrays, parameters: str, sender: SafeSender) -> None:
        self.arrays = arrays
        self.parameters = parameters
        self.sender = sender
        self.key = uuid.uuid4().hex
        self.cancelled = False

    def check(self) -> None:
        if self.cancelled or self.sender.cancelled():
            raise Cancelled


class BlsService:
    """Runs requests on a pool of threads and watches their clients on one more."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        outputs: frozenset[str],
        features: frozenset[str],
        max_in_flight: int,
        inflight: InflightCount,
    ) -> None:
        """
        Args:
            outputs: names of the pipeline's outputs.
            features: "vision" if the model has it.
            max_in_flight: requests at once; more wait.
        """
        self._detokenizer = detokenizer
        self._outputs = outputs
        self._features = features
        self._inflight = inflight
        self._jobs: set[Job] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(max_in_flight, thread_name_prefix="m3-bls")
        self._watcher = threading.Thread(target=self._watch, name="m3-watch", daemon=True)
        self._watcher.start()

    def submit(self, request: Any, arrays: Arrays) -> None:
        """Queue a request; `arrays` must stay valid."""
        job = Job(arrays, request.parameters(), SafeSender(request.get_response_sender()))
        with self._lock:
            self._jobs.add(job)
        self._inflight.add(1)
        self._pool.submit(self._run, job)

    def close(self) -> None:
        """Wait for all requests, then end the threads."""
        self._pool.shutdown()
        self._closed.set()
        self._watcher.join()
        drop_streams()

    def _run(self, job: Job) -> None:
        try:
            failure = self._generate(job)
        except Cancelled:
            failure = None
        except CallError as error:
            failure = error.failure
        except Exception as error:
            failure = failure_of(error)
        with self._lock:
            self._jobs.discard(job)
        try:
            if failure is not None:
                job.sender.send(error_response(failure), final=True)
            job.sender.finish()
        except Exception:
            logger.exception("request %s could not be ended", job.key)
        self._inflight.add(-1)

    def _generate(self, job: Job) -> RequestFailure | None:
        """Stream the answer; an error of the engine is returned after its stream has ended."""
        refuse_unsupported(job.parameters)
        tensors = dict(job.arrays)
        job.check()
        self._step("preprocessing", tensors)
        if "_pixel_values" in tensors:
            job.check()
            self._step("multimodal_encoders", tensors)
        job.check()
        inputs, outputs = routes(ENGINE, self._features)
        feed = {target: tensors[name] for name, target in inputs.items() if name in tensors}
        failure = None
        for arrays in stream(ENGINE, feed, list(outputs), job.key):
            failure = failure_in(arrays)
            if failure is None:
                final = bool(text(arrays, "finish_reason"))
                job.sender.send(response_of(self._answer(arrays)), final=final)
        return failure

    def _step(self, model: str, tensors: Arrays) -> None:
        """Run `model` on the pipeline's tensors and add what it makes."""
        inputs, outputs = routes(model, self._features)
        feed = {target: tensors[name] for name, target in inputs.items() if name in tensors}
        made = call(model, feed, list(outputs))
        tensors.update({outputs[name]: array for name, array in made.items()})

    def _answer(self, arrays: Arrays) -> Arrays:
        """The pipeline's outputs for one response of the engine."""
        outputs = routes(ENGINE, self._features)[1]
        tensors = {outputs[name]: array for name, array in arrays.items()}
        inputs, texts = routes("postprocessing", self._features)
        feed = {target: tensors[name] for name, target in inputs.items() if name in tensors}
        made = postprocess(self._detokenizer, feed)
        tensors.update({texts[name]: array for name, array in made.items()})
        return {name: array for name, array in tensors.items() if name in self._outputs}

    def _watch(self) -> None:
        """Tell the engine about clients that have gone, again until their stream has ended: the
        engine may not have had the request yet."""
        stop = {"input_ids": np.zeros(1, np.int32), "input_lengths": np.ones(1, np.int32)}
        stop |= {"request_output_len": np.ones(1, np.int32), "stop": np.ones(1, np.bool_)}
        while not self._closed.wait(WATCH_S):
            with self._lock:
                jobs = list(self._jobs)
            for job in jobs:
                try:
                    job.cancelled = job.cancelled or job.sender.cancelled()
                    if job.cancelled:
                        for _ in stream(ENGINE, stop, ["output_ids"], job.key):
                            pass
                except Exception as error:  # whatever happens, the others are watched on
                    logger.warning("request %s could not be cancelled: %r", job.key, error)
