"""Generates the live model repository: `model.py` copies and every `config.pbtxt`.

python -m m3trt.serve.repository --engine_dir ENGINE --output_dir REPOSITORY [--set name=value ...]
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from m3trt.build.engine_dir import EngineDir
from m3trt.convert.configuration import ConfigError
from m3trt.serve.check import check_repository
from m3trt.serve.pbtxt import Enum, write
from m3trt.serve.table import (
    Model,
    RepositoryError,
    Scalar,
    Table,
    Tensor,
    load_table,
    parse_settings,
)

ENSEMBLE = "ensemble"
SOURCES = Path(__file__).resolve().parents[1]
"""Holds one folder per model with its `1/model.py`."""


def write_repository(
    engine: EngineDir, output_dir: Path, settings: Mapping[str, str] | None = None
) -> Table:
    """Write a repository that serves `engine` and check what was written.

    Args:
        output_dir: must not exist or be empty.
        settings: overrides of `repository.json`'s settings.

    Returns:
        What was written.

    Raises:
        RepositoryError: a key is missing, unknown or left over, or `output_dir` is in use.
    """
    if output_dir.exists() and any(output_dir.iterdir()):
        raise RepositoryError(f"{output_dir} is not empty: remove it or choose another")
    values: dict[str, Scalar] = {
        "engine_dir": str(engine.path.resolve()),
        "feature_type": "UINT16" if engine.config.dtype == "bfloat16" else "FP32",
        "hidden_size": engine.config.hidden_size,
    }
    if engine.config.vision is not None:
        values["patch_width"] = engine.config.vision.patch_width
    features = frozenset({"vision"} if engine.config.vision is not None else ())
    table = load_table(values, features, settings)
    for model in table.models:
        _write_model(output_dir / model.name, model_config(model, table))
        shutil.copy(SOURCES / model.name / "1" / "model.py", output_dir / model.name / "1")
    _write_model(output_dir / ENSEMBLE, ensemble_config(table))
    check_repository(output_dir)
    return table


def model_config(model: Model, table: Table) -> dict[str, Any]:
    """The `config.pbtxt` of a Python model, as a message."""
    if model.pipeline:
        inputs, outputs = _client_inputs(table), _client_outputs(table)
    else:
        prefix = f"{model.name}."
        inputs = [
            _port(tensor, target.removeprefix(prefix), tensor.optional)
            for tensor in table.tensors
            for target in tensor.targets
            if target.startswith(prefix)
        ]
        outputs = [
            _port(tensor, tensor.source.removeprefix(prefix))
            for tensor in table.tensors
            if tensor.source.startswith(prefix)
        ]
    parameters = dict(model.parameters)
    if table.settings["execution_env_path"]:
        parameters["EXECUTION_ENV_PATH"] = table.settings["execution_env_path"]
    config: dict[str, Any] = {
        "name": model.name,
        "backend": "python",
        "max_batch_size": 1,
        "input": inputs,
        "output": outputs,
        "instance_group": {"count": 1, "kind": Enum("KIND_CPU")},
        "parameters": [
            {"key": key, "value": {"string_value": _text(value)}}
            for key, value in parameters.items()
        ],
    }
    if model.decoupled:
        config["model_transaction_policy"] = {"decoupled": True}
    return config


def ensemble_config(table: Table) -> dict[str, Any]:
    """The `config.pbtxt` of the ensemble, as a message: one step per model that is no pipeline."""
    steps = []
    for model in table.models:
        if model.pipeline:
            continue
        prefix = f"{model.name}."
        inputs = [
            {"key": target.removeprefix(prefix), "value": tensor.name}
            for tensor in table.tensors
            for target in tensor.targets
            if target.startswith(prefix) and not tensor.direct
        ]
        outputs = [
            {"key": tensor.source.removeprefix(prefix), "value": tensor.name}
            for tensor in table.tensors
            if tensor.source.startswith(prefix)
        ]
        step = {"model_name": model.name, "model_version": -1}
        steps.append({**step, "input_map": inputs, "output_map": outputs})
    return {
        "name": ENSEMBLE,
        "platform": "ensemble",
        "max_batch_size": 1,
        "input": _client_inputs(table),
        "output": _client_outputs(table),
        "ensemble_scheduling": {"step": steps},
    }


def _client_inputs(table: Table) -> list[dict[str, Any]]:
    return [
        _port(tensor, tensor.name, tensor.optional)
        for tensor in table.tensors
        if not tensor.source and not tensor.direct
    ]


def _client_outputs(table: Table) -> list[dict[str, Any]]:
    return [_port(tensor, tensor.name) for tensor in table.tensors if tensor.output]


def _port(tensor: Tensor, name: str, optional: bool = False) -> dict[str, Any]:
    port = {
        "name": name,
        "data_type": Enum(f"TYPE_{tensor.type}"),
        "dims": list(tensor.dims),
    }
    return {**port, "optional": True} if optional else port


def _text(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _write_model(directory: Path, config: Mapping[str, Any]) -> None:
    (directory / "1").mkdir(parents=True)
    text = "# Generated by m3trt.serve.repository: edit repository.json instead.\n" + write(config)
    (directory / "config.pbtxt").write_text(text, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m m3trt.serve.repository", description="Write a Triton model repository."
    )
    parser.add_argument("--engine_dir", type=Path, required=True, help="written by m3trt.build")
    parser.add_argument("--output_dir", type=Path, required=True, help="the new repository")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="override a setting of repository.json; may be repeated",
    )
    arguments = parser.parse_args(argv)
    try:
        settings = parse_settings(arguments.set)
        table = write_repository(
            EngineDir.load(arguments.engine_dir), arguments.output_dir, settings
        )
    except (ConfigError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    names = [*(model.name for model in table.models), ENSEMBLE]
    print(f"{arguments.output_dir}: {', '.join(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
