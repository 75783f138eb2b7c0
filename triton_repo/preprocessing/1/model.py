"""Text and pictures of a request to prompt ids and vision patches.

Requests run on threads, so that a picture that arrives slowly holds up nobody else.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from m3trt.preprocess.prompt import Preprocessor
from m3trt.serve.backend import (
    copied_inputs_of,
    error_response,
    parameters_of,
    response_of,
    state_file,
)
from m3trt.serve.errors import failure_of
from m3trt.serve.inflight import InflightCount
from m3trt.serve.prompts import preprocess, refuse_unsupported
from m3trt.serve.sender import SafeSender


class TritonPythonModel:
    def initialize(self, args):
        logging.basicConfig(level=logging.INFO)
        parameters = parameters_of(args)
        hosts = parameters["allowed_media_hosts"].split(",")
        self._preprocessor = Preprocessor.load(
            Path(parameters["engine_dir"]), allowed_media_hosts=[host for host in hosts if host]
        )
        self._inflight = InflightCount(state_file(args, parameters))
        self._pool = ThreadPoolExecutor(int(parameters["max_in_flight"]))

    def execute(self, requests):
        for request in requests:
            arrays, parameters = copied_inputs_of(request), request.parameters()
            self._inflight.add(1)
            sender = SafeSender(request.get_response_sender())
            self._pool.submit(self._run, sender, parameters, arrays)

    def finalize(self):
        self._pool.shutdown()

    def _run(self, sender, parameters, arrays):
        try:
            sender.send(self._answer(parameters, arrays), final=True)
        except Exception:
            logging.exception("a response could not be sent")
        self._inflight.add(-1)

    def _answer(self, parameters, arrays):
        try:
            refuse_unsupported(parameters)
            return response_of(preprocess(self._preprocessor, arrays))
        except Exception as error:
            return error_response(failure_of(error))
