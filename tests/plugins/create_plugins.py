"""Creates plugins in the TensorRT named on the command line; a process of its own for each.

    python create_plugins.py MODULE LIBRARY < cases.json

A case is [op, fields]. Prints JSON: the library's version, its creators of ours, and for each case
[created, log].
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from typing import Any

import numpy as np


def main(module: str, library: str) -> None:
    trt = importlib.import_module(module)
    messages: list[str] = []

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        def log(self, severity: Any, text: str) -> None:
            messages.append(text)

    logger = Logger()
    # The registry's functions log through the logger of the first builder. The runtime of
    # tensorrt-lean wants a driver, so there the plugins' messages go to stderr.
    builder = trt.Builder(logger) if hasattr(trt, "Builder") else None
    registry = trt.get_plugin_registry()
    registry.load_library(library)

    def field(name: str, value: Any) -> Any:
        types = trt.PluginFieldType
        if isinstance(value, str):
            return trt.PluginField(name, np.frombuffer(value.encode(), np.int8), types.CHAR)
        kind = (np.int32, types.INT32) if isinstance(value, int) else (np.float32, types.FLOAT32)
        return trt.PluginField(name, np.array([value], kind[0]), kind[1])

    results = []
    with tempfile.TemporaryFile() as stderr:
        os.dup2(stderr.fileno(), 2)
        for op, fields in json.load(sys.stdin):
            messages.clear()
            stderr.seek(0)
            stderr.truncate()
            creator = registry.get_creator(op, "1", "")
            kept = [field(name, value) for name, value in fields]
            plugin = creator.create_plugin(
                "layers.3", trt.PluginFieldCollection(kept), trt.TensorRTPhase.BUILD
            )
            stderr.seek(0)
            results.append([plugin is not None, "\n".join(messages) + stderr.read().decode()])
    names = [c.name for c in registry.all_creators if c.name.startswith("M3")]
    print(json.dumps({"version": trt.__version__, "creators": names, "results": results}))
    sys.stdout.flush()
    del builder
    os._exit(0)  # without running the libraries' destructors in an order that Python chooses


if __name__ == "__main__":
    main(*sys.argv[1:])
