"""Prompt ids to generated ids: decoupled, all requests in flight in one engine."""

import logging
from pathlib import Path

import triton_python_backend_utils as pb_utils
from m3trt.build.engine_dir import EngineDir
from m3trt.serve.backend import inputs_of, parameters_of, response_of, state_file
from m3trt.serve.inflight import InflightCount
from m3trt.serve.llm import LlmService, load_engine, model_defaults
from m3trt.serve.metrics import EngineMetrics
from m3trt.serve.sender import SafeSender


class TritonPythonModel:
    def initialize(self, args):
        logging.basicConfig(level=logging.INFO)
        parameters = parameters_of(args)
        engine = EngineDir.load(Path(parameters["engine_dir"]))
        self._metrics = EngineMetrics(pb_utils, args["model_name"], args["model_version"])
        self._service = LlmService(
            load_engine(engine, parameters["executor"], int(parameters["max_queue_size"])),
            model_defaults(engine, parameters["exclude_input_in_output"] == "true"),
            response_of,
            InflightCount(state_file(args, parameters)),
            self._metrics.update,
        )

    def execute(self, requests):
        for request in requests:
            sender = SafeSender(request.get_response_sender())
            self._service.handle(inputs_of(request), request.request_id(), sender)

    def finalize(self):
        self._service.close()
        self._metrics.close()
