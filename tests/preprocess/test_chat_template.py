"""The chat template against transformers' rendering of the same file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from m3trt.convert.configuration import ConfigError
from m3trt.preprocess.chat_template import ChatTemplate
from m3trt.preprocess.errors import PreprocessError

pytestmark = pytest.mark.smoke

USER = {"role": "user", "content": "What is <this> & why? é"}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"city": {"type": "string", "d": "é<>&"}}},
}
CONVERSATIONS = [
    pytest.param([USER], None, id="user"),
    pytest.param([{"role": "system", "content": "Be brief."}, USER], None, id="system"),
    pytest.param(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}],
        None,
        id="parts",
    ),
    pytest.param(
        [
            USER,
            {"role": "assistant", "content": "Fine.", "reasoning_content": "Hm."},
            {"role": "tool", "content": "21 C"},
            {"role": "tool", "content": "22 C"},
            USER,
        ],
        [TOOL],
        id="tools",
    ),
]


@pytest.fixture(scope="module")
def template(release_dir: Path) -> ChatTemplate:
    template = ChatTemplate.load(release_dir)
    assert template is not None
    return template


@pytest.mark.full
@pytest.mark.parametrize("mode", [None, "enabled", "disabled", "adaptive"])
@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize(("messages", "tools"), CONVERSATIONS)
def test_equals_reference(
    reference: SimpleNamespace,
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    generate: bool,
    mode: str | None,
) -> None:
    expected = reference.tokenizer.apply_chat_template(
        messages,
        tools=tools,
        tokenize=False,
        add_generation_prompt=generate,
        **({} if mode is None else {"thinking_mode": mode}),
    )
    found = template.render(
        messages, thinking_mode=mode, add_generation_prompt=generate, tools=tools
    )
    assert found == expected


@pytest.mark.parametrize(
    ("mode", "ending"),
    [
        (None, "]~b]ai\n"),
        ("adaptive", "]~b]ai\n"),
        ("enabled", "]~b]ai\n<mm:think>"),
        ("disabled", "]~b]ai\n</mm:think>"),
    ],
)
def test_shape(template: ChatTemplate, mode: str | None, ending: str) -> None:
    text = template.render([USER], thinking_mode=mode)
    assert text.startswith("]~!b[]~b]system\n")
    assert f"]~b]user\n{USER['content']}[e~[\n" in text
    assert text.endswith(f"[e~[\n{ending}")


def test_refusals(template: ChatTemplate) -> None:
    with pytest.raises(PreprocessError, match="thinking_mode is 'often', expected one of"):
        template.render([USER], thinking_mode="often")
    with pytest.raises(PreprocessError, match="unknown role: judge"):
        template.render([{"role": "judge", "content": "?"}])


def test_missing_or_malformed(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    (tmp_path / "chat_template.jinja").write_text("a\n{% if %}")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: chat template, line 2"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}")
    with pytest.raises(ConfigError, match="nested too deeply"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json holds a list, expected an obj"):
        ChatTemplate.load(tmp_path)


def test_special_tokens_are_variables(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}|{{ eos_token }}")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"bos_token": "<b>", "eos_token": {"content": "<e>"}, "pad_token": null, "x_token": 3}'
    )
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render([]) == "<b>|<e>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ (0).__class__ }}",
        "{{ range(100000000) | list }}",
        "{{ 1 // 0 }}",
        "{{ messages[7].content.x.y }}",
    ],
)
def test_sandbox(source: str) -> None:
    """What escapes or fails is an error or prints nothing of the interpreter."""
    template = ChatTemplate(source)
    try:
        text = template.render([USER])
    except PreprocessError as error:
        assert "the chat template failed" in str(error)  # noqa: PT017
    else:
        assert text == ""


def test_endless_output_stops() -> None:
    loop = "{% for i in range(90000) %}{% for j in range(90000) %}xxxx{% endfor %}{% endfor %}"
    template = ChatTemplate(loop, max_rendered_chars=10_000)
    with pytest.raises(PreprocessError, match="more than 10000 characters"):
        template.render([USER])
