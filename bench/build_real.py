"""Builds the engines of the released 60-layer model from its config.json alone and records it.

python -m m3trt.bench.build_real --model_config tests/data/minimax_m3_config.json

Time and peak memory are those of the whole command: the largest process, its children included.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from m3trt.bench.records import append_record
from m3trt.build.engine_dir import EngineDir
from m3trt.convert.configuration import M3Config
from m3trt.convert.hf_config import parse_config

SECONDS_LIMIT = 180.0
PEAK_LIMIT_GB = 8.0


def build(config: M3Config, folder: Path) -> tuple[float, EngineDir]:
    """Build `config` in `folder` as a user would; returns seconds and the engine directory.

    Raises:
        subprocess.CalledProcessError: the build failed.
    """
    checkpoint, output = folder / "checkpoint", folder / "engine"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(config.to_json()))
    command = [sys.executable, "-m", "m3trt.build", "--checkpoint_dir", str(checkpoint)]
    start = time.monotonic()
    subprocess.run([*command, "--output_dir", str(output)], check=True, stdout=sys.stderr)
    return time.monotonic() - start, EngineDir.load(output)


def measure(model_config: Path, tp_size: int) -> dict[str, Any]:
    """Build one rank count and describe it as a result record."""
    config = parse_config(json.loads(model_config.read_text()), {}, tp_size=tp_size)
    with tempfile.TemporaryDirectory() as folder:
        seconds, engine = build(config, Path(folder))
        environment = engine.environment
        programs = {"text": engine.engine(0), "vision": engine.vision_engine}
        sizes = {name: path.stat().st_size / 1e6 for name, path in programs.items()}
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    return {
        "case": {
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "tp_size": tp_size,
            "dtype": config.dtype,
            "targets": list(environment.compute_capabilities),
        },
        "seconds": round(seconds, 1),
        "floor_seconds": None,
        "bound": None,
        "peak_rss_gb": round(peak, 3),
        "engine_mb": {name: round(size, 1) for name, size in sizes.items()},
        "baselines": {},
        "runs": 1,
        "versions": {environment.library: environment.library_version},
    }


def record_case(model_config: Path, tp_size: int) -> dict[str, Any]:
    """Build one rank count, append its record and print it."""
    record = measure(model_config, tp_size)
    append_record("build", record, record.pop("versions"))
    print(json.dumps(record))
    return record


def main(argv: Sequence[str] | None = None) -> int:
    """Build TP 1 and TP 8, append a record each; 1 if one exceeds the limits."""
    parser = argparse.ArgumentParser(
        prog="python -m m3trt.bench.build_real",
        description="Build the real model's engines; record time and peak memory.",
    )
    parser.add_argument("--model_config", type=Path, required=True, help="a released config.json")
    model_config = parser.parse_args(argv).model_config
    failed = False
    for tp_size in (1, 8):
        record = record_case(model_config, tp_size)
        failed |= record["seconds"] > SECONDS_LIMIT or record["peak_rss_gb"] > PEAK_LIMIT_GB
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
