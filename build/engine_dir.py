"""The engine directory: what `build` writes and `runtime` loads.

config.json       {version, pretrained_config, build_config, environment}
rank{r}.onnx      the text program, and that of the reference executor
rank{r}.engine    the same compiled, unless built for the reference executor
vision.onnx, vision.engine            likewise, for models with vision
rank{r}.safetensors, vision.safetensors   links to the checkpoint's files: never copies
tokenizer and template files          copied from the checkpoint
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3trt.build.configuration import BuildConfig, check_keys
from m3trt.build.environment import Environment
from m3trt.build.library import PLUGIN_LIBRARY
from m3trt.build.programs import make_programs
from m3trt.build.weights import check_weights
from m3trt.convert.configuration import ConfigError, M3Config

ENGINE_VERSION = 2
"""Version of this layout and of the engine's inputs and outputs; raised on any change."""

CONFIG_KEYS = {"version", "pretrained_config", "build_config", "environment"}


class EngineDirError(ValueError):
    """An engine directory is incomplete, damaged or does not fit."""


@dataclass(frozen=True, slots=True)
class EngineDir:
    """A checked engine directory."""

    path: Path
    config: M3Config
    build: BuildConfig
    environment: Environment

    @classmethod
    def load(cls, path: Path) -> EngineDir:
        """Read `path` and check that it is whole and that its graphs are those of its config.

        Weights and library are checked separately.

        Raises:
            EngineDirError: names the file that is missing or wrong, and what was expected.
        """
        file = path / "config.json"
        try:
            data = json.loads(file.read_text())
            if isinstance(data, dict) and data.get("version", ENGINE_VERSION) != ENGINE_VERSION:
                raise ConfigError(
                    f"engine version {data['version']!r}, this code reads {ENGINE_VERSION}:"
                    " build the engine again"
                )
            check_keys("engine", data, CONFIG_KEYS)
            engine = cls(
                path,
                M3Config.from_json(data["pretrained_config"]),
                BuildConfig.from_json(data["build_config"]),
                Environment.from_json(data["environment"]),
            )
        except (FileNotFoundError, NotADirectoryError):
            raise EngineDirError(
                f"{file} does not exist: expected a directory written by m3trt.build"
            ) from None
        except (ValueError, RecursionError) as error:
            raise EngineDirError(f"{file}: {error}") from error
        for program_file in engine.programs():
            if not program_file.is_file():
                raise EngineDirError(f"{program_file} is missing: build the engine again")
        try:
            for program in make_programs(engine.config, engine.build):
                for name in program.names:
                    program.check_file(path / f"{name}.onnx")
        except ValueError as error:
            raise EngineDirError(str(error)) from error
        return engine

    def check_environment(self, library: str, plugin_library: Path = PLUGIN_LIBRARY) -> None:
        """Check that `library` ("tensorrt", "tensorrt_rtx" or "reference") can run these engines.

        The reference executor needs only the graphs, so everything passes.

        Raises:
            EngineDirError: names what the engine was built with and what is here.
        """
        if library == "reference":
            return
        if differences := self.environment.differences(library, plugin_library):
            raise EngineDirError(
                f"{self.path} does not fit this machine: {'; '.join(differences)}."
                " Build the engine again, or install what it was built with"
            )

    def check_weights(self) -> None:
        """Check the header of every weight file against its graph; reads no weight.

        Raises:
            EngineDirError: a file is missing, or holds other tensors than the graph needs.
        """
        pairs = [(self.weights(r), self.onnx(r)) for r in range(self.config.tp_size)]
        if self.config.vision is not None:
            pairs.append((self.vision_weights, self.vision_onnx))
        for weights, onnx in pairs:
            if not weights.is_symlink() and not weights.exists():
                raise EngineDirError(
                    f"{weights} is missing: the engine was built from a config without weights."
                    f" Convert the checkpoint and link its {weights.name} there"
                )
            if not weights.exists():
                raise EngineDirError(
                    f"{weights} is a broken link to {weights.readlink()}: the checkpoint was moved"
                    " or deleted. Repair the link or build the engine again"
                )
            try:
                check_weights(weights, onnx)
            except ValueError as error:
                raise EngineDirError(str(error)) from error

    def programs(self) -> list[Path]:
        """Every graph and engine that the directory must hold."""
        stems = program_names(self.config)
        suffixes = [".onnx"] if self.environment.library == "reference" else [".onnx", ".engine"]
        return [self.path / (stem + suffix) for stem in stems for suffix in suffixes]

    def onnx(self, rank: int) -> Path:
        return self.path / f"rank{rank}.onnx"

    def engine(self, rank: int) -> Path:
        return self.path / f"rank{rank}.engine"

    def weights(self, rank: int) -> Path:
        return self.path / f"rank{rank}.safetensors"

    @property
    def vision_onnx(self) -> Path:
        return self.path / "vision.onnx"

    @property
    def vision_engine(self) -> Path:
        return self.path / "vision.engine"

    @property
    def vision_weights(self) -> Path:
        return self.path / "vision.safetensors"


def program_names(config: M3Config) -> list[str]:
    """File stems of the graphs of a model: one a rank, and the vision encoder."""
    ranks = [f"rank{rank}" for rank in range(config.tp_size)]
    return ranks if config.vision is None else [*ranks, "vision"]


def engine_json(config: M3Config, build: BuildConfig, environment: Environment) -> dict[str, Any]:
    """The content of the engine's `config.json`."""
    return {
        "version": ENGINE_VERSION,
        "pretrained_config": config.to_json(),
        "build_config": build.to_json(),
        "environment": dataclasses.asdict(environment),
    }
