"""The graphs of an engine, made from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx
from m3trt.build.configuration import BuildConfig
from m3trt.build.network import build_text_network
from m3trt.build.profiles import (
    DimensionRange,
    check_sizes,
    text_dimensions,
    vision_dimensions,
)
from m3trt.build.vision_network import build_vision_network
from m3trt.convert.configuration import M3Config


@dataclass(frozen=True, slots=True)
class Program:
    """A graph, the ranges of its dimensions, and the file stems that it is stored under."""

    model: onnx.ModelProto
    dimensions: dict[str, DimensionRange]
    names: tuple[str, ...]

    def check_file(self, path: Path) -> None:
        """Check that `path` holds this graph and nothing else.

        Raises:
            ValueError: it is damaged, or was made from another configuration or version.
        """
        try:
            found = onnx.load(path)
        except Exception as error:  # protobuf's own
            raise ValueError(f"{path} is damaged: {error}. Build the engine again") from error
        if found != self.model:
            raise ValueError(
                f"{path} is not the graph of the config.json beside it: one of the two comes from"
                " another engine or version. Build the engine again"
            )


def make_programs(config: M3Config, build: BuildConfig) -> list[Program]:
    """The different graphs of a model; ranks that share a graph share a program.

    Raises:
        ConfigError: a tensor could reach 2**31 elements.
    """
    graphs = {
        f"rank{rank}": (build_text_network(config, build, rank), text_dimensions(config, build))
        for rank in range(config.tp_size)
    }
    if config.vision is not None:
        graphs["vision"] = build_vision_network(config), vision_dimensions(config, build)
    same: dict[bytes, list[str]] = {}
    for name, (model, dimensions) in graphs.items():
        check_sizes(model, dimensions)
        same.setdefault(model.SerializeToString(deterministic=True), []).append(name)
    return [Program(*graphs[names[0]], tuple(names)) for names in same.values()]
