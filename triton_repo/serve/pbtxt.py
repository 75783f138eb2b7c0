"""Writes and reads protobuf text, as far as a Triton `config.pbtxt` needs it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Message = dict[str, list[Any]]
"""Field name -> all its values; a value is a scalar or another message."""

_TOKEN = re.compile(r'#[^\n]*|"(?:[^"\\\n]|\\.)*"|[{}\[\]:,]|[A-Za-z_]\w*|-?\d+|\S')
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n"}


class PbtxtError(ValueError):
    """The text is no protobuf text of this subset."""


class Enum(str):
    """An enum value: written without quotes."""


def write(message: Mapping[str, Any], indent: int = 0) -> str:
    """The text of `message`. Mappings are nested messages, lists are repeated fields."""
    lines = []
    pad = "  " * indent
    for name, value in message.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping):
                lines.append(f"{pad}{name} {{\n{write(item, indent + 1)}{pad}}}\n")
            else:
                lines.append(f"{pad}{name}: {_scalar(item)}\n")
    return "".join(lines)


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Enum | int):
        return str(value)
    if isinstance(value, str):
        return '"' + "".join(_ESCAPES.get(char, char) for char in value) + '"'
    raise TypeError(f"cannot write a {type(value).__name__} as protobuf text")


def parse(text: str) -> Message:
    """Read `write`'s form and lists in brackets.

    Raises:
        PbtxtError: naming the token that does not belong where it is.
    """
    tokens = iter([*(token for token in _TOKEN.findall(text) if token[0] != "#"), ""])
    return _message(tokens, end="")


def _message(tokens: Iterator[str], end: str) -> Message:
    fields: Message = {}
    for name in tokens:
        if name == end:
            return fields
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise PbtxtError(f"expected a field name or {end!r}, found {name!r}")
        token = next(tokens, "")
        if token == ":":
            token = next(tokens, "")
        fields.setdefault(name, []).extend(_values(token, tokens))
    raise PbtxtError(f"the text ends where {end!r} was expected")


def _values(token: str, tokens: Iterator[str]) -> Iterator[Any]:
    if token != "[":
        yield _value(token, tokens)
        return
    token = next(tokens, "")
    while token != "]":
        yield _value(token, tokens)
        token = next(tokens, "")
        if token == ",":
            token = next(tokens, "")


def _value(token: str, tokens: Iterator[str]) -> Any:
    if token == "{":
        return _message(tokens, end="}")
    if token.startswith('"'):
        return re.sub(r"\\(.)", lambda match: {"n": "\n"}.get(match[1], match[1]), token[1:-1])
    if re.fullmatch(r"-?\d+", token):
        return int(token)
    if token in ("true", "false"):
        return token == "true"
    if re.fullmatch(r"[A-Za-z_]\w*", token):
        return Enum(token)
    raise PbtxtError(f"expected a value, found {token!r}")
