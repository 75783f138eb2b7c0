"""Text and pictures of a request to prompt ids and vision patches."""

from pathlib import Path

from m3trt.preprocess.prompt import Preprocessor
from m3trt.serve.backend import error_response, inputs_of, parameters_of, response_of
from m3trt.serve.errors import failure_of
from m3trt.serve.prompts import preprocess, refuse_unsupported


class TritonPythonModel:
    def initialize(self, args):
        parameters = parameters_of(args)
        hosts = parameters["allowed_media_hosts"].split(",")
        self._preprocessor = Preprocessor.load(
            Path(parameters["engine_dir"]), allowed_media_hosts=[host for host in hosts if host]
        )

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        try:
            refuse_unsupported(request.parameters())
            return response_of(preprocess(self._preprocessor, inputs_of(request)))
        except Exception as error:
            return error_response(failure_of(error))
