"""Generated ids to text, without state; turns the engine's in-band error into the request's."""

from pathlib import Path

from m3trt.preprocess.detokenizer import Detokenizer
from m3trt.preprocess.tokenizer import Tokenizer
from m3trt.serve.backend import error_response, inputs_of, parameters_of, response_of
from m3trt.serve.errors import failure_of
from m3trt.serve.texts import failure_in, postprocess


class TritonPythonModel:
    def initialize(self, args):
        tokenizer = Tokenizer.load(Path(parameters_of(args)["engine_dir"]))
        self._detokenizer = Detokenizer(tokenizer)

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        try:
            arrays = inputs_of(request)
            if failure := failure_in(arrays):
                return error_response(failure)
            return response_of(postprocess(self._detokenizer, arrays))
        except Exception as error:
            return error_response(failure_of(error))
