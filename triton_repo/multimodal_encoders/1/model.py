"""Vision patches to rows of the prompt embedding table; nothing for a request without pictures.

`_cu_seqlens` always comes, because the server cannot run a step without any input.
"""

from pathlib import Path

import ml_dtypes
import numpy as np
from m3trt.build.engine_dir import EngineDir
from m3trt.runtime.executors import create_vision_executor
from m3trt.serve.backend import error_response, inputs_of, parameters_of, response_of
from m3trt.serve.errors import failure_of


class TritonPythonModel:
    def initialize(self, args):
        parameters = parameters_of(args)
        engine = EngineDir.load(Path(parameters["engine_dir"]))
        self._executor = create_vision_executor(engine, parameters["executor"])
        self._bits = engine.config.dtype == "bfloat16"

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def finalize(self):
        self._executor.close()

    def _answer(self, request):
        try:
            arrays = inputs_of(request)
            patches = arrays.get("_pixel_values")
            if patches is None:
                return response_of({})
            rows = self._executor.encode(
                patches.view(ml_dtypes.bfloat16) if self._bits else patches,
                arrays["_patch_positions"],
                arrays["_cu_seqlens"],
            )
            return response_of(
                {"_prompt_embedding_table": rows.view(np.uint16) if self._bits else rows}
            )
        except Exception as error:
            return error_response(failure_of(error))
