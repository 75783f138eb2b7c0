"""The whole pipeline as one model that clients can cancel; same tensors as the ensemble."""

import json
import logging
from pathlib import Path

from m3trt.preprocess.detokenizer import Detokenizer
from m3trt.preprocess.tokenizer import Tokenizer
from m3trt.serve.backend import copied_inputs_of, parameters_of, state_file
from m3trt.serve.bls import BlsService
from m3trt.serve.inflight import InflightCount


class TritonPythonModel:
    def initialize(self, args):
        logging.basicConfig(level=logging.INFO)
        parameters = parameters_of(args)
        config = json.loads(args["model_config"])
        inputs = {tensor["name"] for tensor in config["input"]}
        self._service = BlsService(
            Detokenizer(Tokenizer.load(Path(parameters["engine_dir"]))),
            frozenset(tensor["name"] for tensor in config["output"]),
            frozenset({"vision"} if "image_url_input" in inputs else ()),
            int(parameters["max_in_flight"]),
            InflightCount(state_file(args, parameters)),
        )

    def execute(self, requests):
        for request in requests:
            self._service.submit(request, copied_inputs_of(request))

    def finalize(self):
        self._service.close()
