"""Checks a model repository from its files alone: names, dtypes, shapes and ensemble edges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from m3trt.serve.pbtxt import Message, PbtxtError, parse
from m3trt.serve.table import RepositoryError

Port = tuple[str, tuple[int, ...]]
"""Data type and dims."""


def check_repository(directory: Path) -> None:
    """Read every `config.pbtxt` in `directory` again and check that all fits together.

    Raises:
        RepositoryError: names the model and the key that is wrong.
    """
    configs = {path.parent.name: _load(path) for path in sorted(directory.glob("*/config.pbtxt"))}
    for name, config in configs.items():
        version = directory / name / "1"
        if config.get("platform") == ["ensemble"]:
            _check_ensemble(name, config, configs)
        elif not (version / "model.py").is_file():
            raise RepositoryError(f"{version / 'model.py'} is missing")


def _load(path: Path) -> Message:
    text = path.read_text(encoding="utf-8")
    if "${" in text:
        placeholder = text[text.index("${") :].split("}")[0]
        raise RepositoryError(f"{path}: {placeholder}}} was left over")
    try:
        config = parse(text)
    except PbtxtError as error:
        raise RepositoryError(f"{path}: {error}") from error
    if config.get("name") != [path.parent.name]:
        raise RepositoryError(f"{path}: name is {config.get('name')}, expected its folder's")
    return config


def _ports(model: str, config: Message, kind: str) -> dict[str, Port]:
    found: dict[str, Port] = {}
    for port in config.get(kind, []):
        name = str(port["name"][0])
        if name in found:
            raise RepositoryError(f"{model}: {kind} {name!r} is declared twice")
        found[name] = (str(port["data_type"][0]), tuple(port["dims"]))
    return found


def _required(config: Message) -> set[str]:
    return {
        str(port["name"][0]) for port in config.get("input", []) if port.get("optional") != [True]
    }


def _check_ensemble(name: str, config: Message, configs: dict[str, Message]) -> None:
    """Every edge joins declared tensors of one type; nothing hangs loose."""
    known = _ports(name, config, "input")
    unread = set(known)
    steps = config["ensemble_scheduling"][0]["step"]
    for step in steps:
        model = str(step["model_name"][0])
        if model not in configs:
            raise RepositoryError(f"{name}: step {model!r} is not in the repository")
        for target, tensor, port in _edges(name, step, configs, "output"):
            if tensor in known:
                raise RepositoryError(f"{name}: {tensor!r} has two sources, one {model}.{target}")
            known[tensor] = port
    for step in steps:
        model = str(step["model_name"][0])
        mapped = set()
        for target, tensor, port in _edges(name, step, configs, "input"):
            if tensor not in known:
                raise RepositoryError(
                    f"{name}: {model}.{target} reads {tensor!r}, which is nowhere"
                )
            if known[tensor] != port:
                raise RepositoryError(
                    f"{name}: {tensor!r} is {known[tensor]}, {model}.{target} expects {port}"
                )
            mapped.add(target)
            unread.discard(tensor)
        if missing := sorted(_required(configs[model]) - mapped):
            raise RepositoryError(f"{name}: nothing feeds inputs {missing} of {model}")
    if unread:
        raise RepositoryError(f"{name}: no step reads inputs {sorted(unread)}")
    for tensor, port in _ports(name, config, "output").items():
        if known.get(tensor) != port:
            raise RepositoryError(
                f"{name}: output {tensor!r} is {port}, its source {known.get(tensor)}"
            )


def _edges(
    ensemble: str, step: dict[str, Any], configs: dict[str, Message], kind: str
) -> list[tuple[str, str, Port]]:
    """(tensor of the model, tensor of the ensemble, port) of one step's inputs or outputs."""
    model = str(step["model_name"][0])
    ports = _ports(model, configs[model], kind)
    edges = []
    for edge in step.get(f"{kind}_map", []):
        target = str(edge["key"][0])
        if target not in ports:
            raise RepositoryError(f"{ensemble}: {model} has no {kind} {target!r}")
        edges.append((target, str(edge["value"][0]), ports[target]))
    return edges
