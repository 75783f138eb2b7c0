"""Renders the checkpoint's own chat template in jinja's sandbox, as transformers does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from m3trt.convert.configuration import ConfigError
from m3trt.preprocess.errors import PreprocessError

THINKING_MODES = ("enabled", "disabled", "adaptive")

MAX_RENDERED_CHARS = 16 * 1024 * 1024
"""More than the longest context can hold; stops a template that loops."""


class ChatTemplate:
    """A compiled chat template; safe to use from several threads."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str] | None = None,
        max_rendered_chars: int = MAX_RENDERED_CHARS,
    ) -> None:
        """
        Args:
            source: the jinja text.
            special_tokens: variables such as `bos_token` that the template may use.
            max_rendered_chars: rendering stops with an error beyond it.

        Raises:
            ConfigError: `source` is not a valid template.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special_tokens = special_tokens or {}
        self._max_rendered_chars = max_rendered_chars
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error
        except RecursionError:
            raise ConfigError("chat template: nested too deeply") from None

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate | None:
        """Read `directory/chat_template.jinja`; None when there is none.

        Raises:
            ConfigError: the template or `tokenizer_config.json` is malformed.
        """
        path = directory / "chat_template.jinja"
        if not path.exists():
            return None
        try:
            return cls(path.read_text(encoding="utf-8"), _special_tokens(directory))
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        thinking_mode: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """The prompt for `messages` ({"role": ..., "content": ...}).

        Raises:
            PreprocessError: unknown `thinking_mode`, the template refuses the messages or fails,
                or the result is too long.
        """
        variables: dict[str, Any] = {
            **self._special_tokens,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        if thinking_mode is not None:
            if thinking_mode not in THINKING_MODES:
                raise PreprocessError(
                    f"thinking_mode is {thinking_mode!r}, expected one of {THINKING_MODES}"
                )
            variables["thinking_mode"] = thinking_mode
        pieces, length = [], 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > self._max_rendered_chars:
                    raise PreprocessError(
                        f"the chat template wrote more than {self._max_rendered_chars} characters"
                    )
        except PreprocessError:
            raise
        except Exception as error:  # a template can fail with any Python error
            raise PreprocessError(f"the chat template failed: {error}") from error
        return "".join(pieces)


def _special_tokens(directory: Path) -> dict[str, str]:
    path = directory / "tokenizer_config.json"
    if not path.exists():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}, expected an object")
    found: dict[str, str] = {}
    for key, value in data.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """jinja's own filter escapes HTML and non-ASCII characters, which would change prompts."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
