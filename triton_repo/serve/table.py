"""Reads `repository.json`, the one table of models and tensors, and fills in its settings."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("repository.json")

Scalar = str | int | bool


class RepositoryError(ValueError):
    """The table, a setting or the generated repository is wrong; names the key."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the pipeline.

    `source` and `targets` are "model.TENSOR"; a tensor without source comes from the client, one
    with `output` goes there. `optional` frees the targets from needing it. A `direct` tensor is
    an input of its targets that the pipeline does not use.
    """

    name: str
    type: str
    dims: tuple[int, ...]
    source: str = ""
    targets: tuple[str, ...] = ()
    optional: bool = False
    output: bool = False
    direct: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """A Python model; a `pipeline` model has the inputs and outputs of the ensemble."""

    name: str
    parameters: Mapping[str, Scalar]
    decoupled: bool = False
    pipeline: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    tensors: tuple[Tensor, ...]
    models: tuple[Model, ...]
    settings: Mapping[str, Scalar] = field(default_factory=dict)


def load_table(
    engine: Mapping[str, Scalar],
    features: frozenset[str],
    settings: Mapping[str, str] | None = None,
    path: Path = TABLE,
) -> Table:
    """The table with every placeholder filled in.

    Args:
        engine: values that follow from the engine directory.
        features: "vision" if the model has it; rows that need another feature are left out.
        settings: overrides of the table's settings, as text.

    Raises:
        RepositoryError: a key is missing, unknown or used by nothing.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    _keys("the table", data, {"settings", "tensors", "models"})
    values = {**_override(data["settings"], settings or {}), **engine}
    used: set[str] = set()
    tensors = [
        _tensor(_fill(row, values, used)) for row in data["tensors"] if _wanted(row, features)
    ]
    models = [
        _model(name, _fill(row, values, used))
        for name, row in data["models"].items()
        if _wanted(row, features)
    ]
    unused = sorted(set(data["settings"]) - used - {"execution_env_path"})
    if unused:
        raise RepositoryError(f"settings {unused} are used by no model: remove them")
    return Table(tuple(tensors), tuple(models), values)


def parse_settings(pairs: Iterable[str]) -> dict[str, str]:
    """Read "name=value" pairs.

    Raises:
        RepositoryError: a pair has no "=".
    """
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise RepositoryError(f"--set {pair!r}, expected name=value")
        settings[name] = value
    return settings


def _override(defaults: Mapping[str, Scalar], given: Mapping[str, str]) -> dict[str, Scalar]:
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise RepositoryError(f"unknown settings {unknown}, expected some of {sorted(defaults)}")
    return {
        name: _convert(name, given[name], default) if name in given else default
        for name, default in defaults.items()
    }


def _convert(name: str, text: str, default: Scalar) -> Scalar:
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise RepositoryError(f"setting {name} is {text!r}, expected true or false")
        return text.lower() == "true"
    if isinstance(default, int):
        if not re.fullmatch(r"\d+", text) or int(text) < 1:
            raise RepositoryError(f"setting {name} is {text!r}, expected an integer of at least 1")
        return int(text)
    return text


def _fill(value: Any, values: Mapping[str, Scalar], used: set[str]) -> Any:
    """Replace every "${name}" in a JSON value; a string that is only a placeholder takes the
    value's own type."""
    if isinstance(value, dict):
        return {key: _fill(item, values, used) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, values, used) for item in value]
    if not isinstance(value, str) or not (names := re.findall(r"\$\{([^}]*)\}?", value)):
        return value
    missing = [name for name in names if name not in values]
    if missing:
        raise RepositoryError(f"{value!r} needs {missing}, known are {sorted(values)}")
    used.update(names)
    if value == f"${{{names[0]}}}":
        return values[names[0]]
    return re.sub(r"\$\{([^}]*)\}", lambda match: str(values[match[1]]), value)


def _wanted(row: Mapping[str, Any], features: frozenset[str]) -> bool:
    return row.get("needs") is None or row["needs"] in features


def _tensor(row: dict[str, Any]) -> Tensor:
    what = f"tensor {row.get('name')!r}"
    optional = {"from", "to", "optional", "output", "direct", "needs"}
    _keys(what, row, {"name", "type", "dims"}, optional)
    if not row.get("to") and not row.get("output"):
        raise RepositoryError(f"{what} goes nowhere, expected `to` or `output`")
    return Tensor(
        row["name"],
        row["type"],
        tuple(row["dims"]),
        row.get("from", ""),
        tuple(row.get("to", ())),
        row.get("optional", False),
        row.get("output", False),
        row.get("direct", False),
    )


def _model(name: str, row: dict[str, Any]) -> Model:
    row = {key: value for key, value in row.items() if key != "needs"}
    _keys(f"model {name!r}", row, {"parameters"}, {"decoupled", "pipeline"})
    return Model(name, **row)


def _keys(
    what: str, found: Mapping[str, Any], required: set[str], optional: set[str] | None = None
) -> None:
    missing = sorted(required - set(found))
    unknown = sorted(set(found) - required - (optional or set()))
    if missing or unknown:
        raise RepositoryError(f"{what}: missing keys {missing}, unknown keys {unknown}")


@functools.cache
def client_inputs() -> tuple[str, ...]:
    """Names of all tensors that a client can send."""
    rows = json.loads(TABLE.read_text(encoding="utf-8"))["tensors"]
    return tuple(r["name"] for r in rows if "from" not in r and not r.get("direct"))


@functools.cache
def routes(model: str, features: frozenset[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Of `model` in the pipeline: {pipeline tensor: its input}, {its output: pipeline tensor}."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))["tensors"]
    rows = [row for row in table if _wanted(row, features)]
    prefix = f"{model}."
    inputs = {
        row["name"]: target.removeprefix(prefix)
        for row in rows
        if not row.get("direct")
        for target in row.get("to", ())
        if target.startswith(prefix)
    }
    outputs = {
        row["from"].removeprefix(prefix): row["name"]
        for row in rows
        if row.get("from", "").startswith(prefix)
    }
    return inputs, outputs
