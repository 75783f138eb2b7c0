"""From a checkpoint directory to an engine directory."""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import onnx
from m3trt.build.builder import BuildReport, EngineTask
from m3trt.build.configuration import BuildConfig
from m3trt.build.engine_dir import (
    EngineDir,
    EngineDirError,
    engine_json,
    program_names,
)
from m3trt.build.environment import Environment
from m3trt.build.profiles import input_ranges
from m3trt.build.programs import make_programs
from m3trt.build.targets import choose_targets
from m3trt.build.workers import build_all
from m3trt.convert.checkpoint import copy_files
from m3trt.convert.configuration import M3Config
from m3trt.convert.directory import new_directory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compiler:
    """How graphs become engines; without `compute_capabilities` see `choose_targets`."""

    library: str
    plugin_library: Path
    compute_capabilities: tuple[int, ...] | None = None
    workers: int = 1
    timing_cache_dir: Path | None = None
    verbose: bool = False


def write_engine_dir(
    checkpoint_dir: Path, output_dir: Path, build: BuildConfig, compiler: Compiler
) -> dict[str, BuildReport]:
    """Write `output_dir`, whole or not at all; returns a report for each engine that was built.

    Raises:
        ConfigError: the checkpoint or the limits are unusable.
        ConvertError: the output exists.
        EngineDirError: weight files are missing or do not fit the graphs.
        BuildError, LibraryError: see `builder` and `library`.
    """
    if compiler.timing_cache_dir is not None and not compiler.timing_cache_dir.is_dir():
        raise EngineDirError(
            f"--input_timing_cache {compiler.timing_cache_dir} is no directory: expected that of an"
            " earlier engine, or leave it out"
        )
    if compiler.timing_cache_dir is not None and compiler.library != "tensorrt":
        raise EngineDirError(
            f"--input_timing_cache is for tensorrt: {compiler.library} has no timing cache"
        )
    if compiler.library == "tensorrt_rtx":
        logger.info("no timing cache: tensorrt_rtx chooses kernels when it loads an engine")
    config = M3Config.load(checkpoint_dir)
    programs = make_programs(config, build)
    targets = choose_targets(compiler.library, build, compiler.compute_capabilities)
    environment = Environment.current(
        compiler.library, compiler.plugin_library, targets.compute_capabilities
    )
    reports: dict[str, BuildReport] = {}
    with new_directory(output_dir) as folder:
        linked = _link_weights(checkpoint_dir, folder, config)
        copy_files(checkpoint_dir, folder)
        tasks = []
        for program in programs:
            first = folder / f"{program.names[0]}.onnx"
            onnx.save(program.model, first)
            _share(first, program.names)
            task = EngineTask(
                name=program.names[0],
                library=compiler.library,
                onnx=first,
                engine=first.with_suffix(".engine"),
                ranges=input_ranges(program.model, program.dimensions),
                plugin_library=compiler.plugin_library.resolve(),
                compute_capabilities=None if targets.at_hand else targets.compute_capabilities,
                timing_cache=_timing_cache(compiler, program.names[0]),
                verbose=compiler.verbose,
            )
            tasks.append(task)
        if compiler.library != "reference":
            build_all(tasks, compiler.workers, lambda task, x: _note(reports, task, x))
            for program in programs:
                _share(folder / f"{program.names[0]}.engine", program.names)
        content = engine_json(config, build, environment)
        (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
        engine = EngineDir.load(folder)
        if linked:
            engine.check_weights()
    return reports


def _note(reports: dict[str, BuildReport], task: EngineTask, report: BuildReport) -> None:
    reports[task.name] = report
    logger.info(
        "%s.engine: %.1f s, peak memory %.2f GB, %.2f MB",
        task.name,
        report.seconds,
        report.peak_bytes / 1e9,
        report.engine_bytes / 1e6,
    )


def _share(first: Path, names: tuple[str, ...]) -> None:
    """Give the file of the first name the others too, without a second copy where possible."""
    for name in names[1:]:
        other = first.with_name(name + first.suffix)
        try:
            os.link(first, other)
        except OSError:
            shutil.copyfile(first, other)


def _link_weights(checkpoint_dir: Path, folder: Path, config: M3Config) -> bool:
    """Link the weights relative to the folder; False for a checkpoint that is only a config.

    Raises:
        EngineDirError: some weight files exist and others do not.
    """
    files = [f"{name}.safetensors" for name in program_names(config)]
    missing = [name for name in files if not (checkpoint_dir / name).is_file()]
    if len(missing) == len(files):
        logger.warning("%s holds no weights: the engine is built without", checkpoint_dir)
        return False
    if missing:
        raise EngineDirError(f"{checkpoint_dir} has a config for {files} but lacks {missing}")
    source = os.path.relpath(checkpoint_dir.resolve(), folder.resolve())
    for name in files:
        (folder / name).symlink_to(Path(source) / name)
    return True


def _timing_cache(compiler: Compiler, name: str) -> Path | None:
    if compiler.timing_cache_dir is None:
        return None
    file = compiler.timing_cache_dir / f"{name}.cache"
    if not file.is_file():
        logger.warning("%s does not exist: %s.engine is timed anew", file, name)
        return None
    return file
