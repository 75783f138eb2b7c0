"""Wrong requests get an error of their own; the server and other requests go on."""

from __future__ import annotations

import base64
import struct
import urllib.request
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from m3trt.serve.api import ServerApi
from m3trt.serve.demo import draw_picture, encode_png

pytestmark = pytest.mark.full

PNG = encode_png(draw_picture(70))


def data_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def bomb() -> bytes:
    """A small file that claims to hold 2.5 gigapixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"\0" * 1_000_000)
    chunks = (header, data, b"IEND")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        for chunk in chunks
    )


@pytest.fixture(scope="module", autouse=True)
def _other_requests_finish(server: Any) -> Iterator[None]:
    """Long streams run all the time; their text is right at the end."""
    bodies = {"ensemble": "first", "tensorrt_llm_bls": "second"}
    alone = {m: server.generate(m, text_input=t, max_tokens=100).text for m, t in bodies.items()}
    with ThreadPoolExecutor(2) as pool:
        running = True

        def ask(model: str) -> int:
            count = 0
            while running:
                answer = server.stream(model, text_input=bodies[model], max_tokens=100)
                assert answer.text == alone[model]
                count += 1
            return count

        asking = [pool.submit(ask, model) for model in bodies]
        yield
        running = False
    assert all(future.result() >= 1 for future in asking)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param({"text_input": ""}, "the text is empty", id="empty-prompt"),
        pytest.param({"text_input": "word " * 3000}, "the engine takes at most", id="long-prompt"),
        pytest.param({"max_tokens": 0}, "max_tokens is 0", id="max-tokens-0"),
        pytest.param({"max_tokens": -5}, "max_tokens is -5", id="max-tokens-negative"),
        pytest.param({"max_tokens": 2**31 - 1}, "max_tokens may be at most", id="max-tokens-huge"),
        pytest.param({"max_tokens": 2**40}, "", id="max-tokens-int64"),
        pytest.param({"max_tokens": None}, "max_tokens is missing", id="no-max-tokens"),
        pytest.param({"text_input": None}, "text_input is missing", id="no-text"),
        pytest.param({"text_input": 5}, "non-string", id="text-is-number"),
        pytest.param({"temperature": "hot"}, "non-number", id="temperature-is-text"),
        pytest.param({"temperature": -1.0}, "temperature is -1.0", id="temperature-negative"),
        pytest.param({"top_p": 1.5}, "top_p is 1.5", id="top-p"),
        pytest.param({"beam_width": 4}, "beam_width is 4", id="beams"),
        pytest.param({"lora_task_id": 4}, "lora_task_id is not supported", id="lora"),
        pytest.param({"temprature": 1.0}, "did you mean temperature", id="misspelt"),
        pytest.param({"thinking_mode": "hard"}, "expected one of", id="thinking-mode"),
        pytest.param({"image_url_input": data_url(b"no picture")}, "image 1", id="not-an-image"),
        pytest.param({"image_url_input": data_url(PNG[:-40])}, "image 1", id="truncated"),
        pytest.param({"image_url_input": data_url(bomb())}, "image 1", id="bomb"),
        pytest.param({"image_url_input": "file:///etc/passwd"}, "not allowed", id="local-file"),
        pytest.param({"image_url_input": "http://127.0.0.1:1/x"}, "private", id="private-host"),
        pytest.param(
            {"text_input": "]<]image[>[ a", "image_url_input": [data_url(PNG)] * 2},
            "1 placeholders",
            id="too-few-placeholders",
        ),
        pytest.param({"text_input": "]<]image[>["}, "1 placeholders", id="placeholder-alone"),
    ],
)
def test_http(server: Any, entry: str, body: dict[str, Any], message: str) -> None:
    reply = server.generate(entry, **body)
    assert reply.status in (400, 500)
    assert reply.error
    assert message in reply.error
    assert "Traceback" not in reply.error


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param({"text_input": b"\xff\xfe"}, "not valid UTF-8", id="invalid-utf8"),
        pytest.param({"temperature": float("nan")}, "temperature is nan", id="nan"),
        pytest.param({"top_p": float("nan")}, "top_p is nan", id="nan-top-p"),
        pytest.param({"temperature": float("inf")}, "temperature is inf", id="infinity"),
        pytest.param({"text_input": np.ones((1, 1), np.int32)}, "BYTES", id="text-is-int32"),
        pytest.param({"max_tokens": np.ones((1, 1), np.float32)}, "INT32", id="tokens-are-fp32"),
        pytest.param({"max_tokens": np.ones((1, 2), np.int32)}, "shape", id="two-max-tokens"),
        pytest.param(
            {"text_input": np.array([["a"], ["b"]], np.object_)}, "batch", id="batch-of-two"
        ),
        pytest.param({"max_tokens": None}, "max_tokens is missing", id="no-max-tokens"),
        pytest.param({"text_input": None}, "text_input is missing", id="no-text"),
        pytest.param({"lora_weights": 1.0}, "lora_weights", id="unknown-input"),
        pytest.param({"stop_words": ["x" * 2000]}, "stop_words", id="long-stop-word"),
        pytest.param(
            {"image_bytes_input": np.zeros((1, 1, 8, 8, 2), np.uint8)}, "image 1", id="channels"
        ),
        pytest.param(
            {"image_bytes_input": np.zeros((1, 8, 8, 3), np.uint8)}, "shape", id="three-dims"
        ),
        pytest.param(
            {"embedding_bias_words": "a", "embedding_bias_weights": [1.0, 2.0]},
            "one weight a word",
            id="bias",
        ),
    ],
)
def test_grpc_stream(server: Any, entry: str, values: dict[str, Any], message: str) -> None:
    answer = server.stream(entry, **values)
    assert message in answer.error
    assert answer.pieces == []


def test_the_engine_itself_answers_errors_in_band(server: Any) -> None:
    only_ids = {"text_input": None, "max_tokens": None, "stream": None, "input_ids": [2**30]}
    cases = {
        b"prompt_embedding_table": {"input_lengths": 1, "request_output_len": 4},
        b"max_tokens is missing (request_output_len": {"streaming": True},
        b"input_lengths is 5": {"input_lengths": 5, "request_output_len": 4},
    }
    for text, values in cases.items():
        answer = server.stream("tensorrt_llm", **only_ids, **values)
        assert answer.finish_reason == "error"
        code, message = answer.arrays[0]["_error"].reshape(-1)
        assert (code, text in message) == (b"INVALID_ARG", True)


def test_an_unknown_model(server: Any) -> None:
    reply = server.generate("no_such_model")
    assert reply.status in (400, 404)
    assert "no_such_model" in reply.error
    assert "no_such_model" in server.stream("no_such_model").error


def test_text_that_is_no_json(server: Any) -> None:
    url = f"http://{server.info['http']}/v2/models/ensemble/generate"
    for body in (b"", b"{", b"[1]", b'{"text_input": NaN}', b"\xff" * 100):
        with pytest.raises(urllib.request.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(url, body), timeout=10)
        assert caught.value.code in (400, 500)


def test_bodies_that_need_a_deep_stack(server: Any) -> None:
    """Form bodies (the default of curl and urllib) are copied there, JSON is parsed recursively."""
    large = b'{"text_input": "", "ignored": "' + b"x" * 12_000_000 + b'"}'
    deep = b'{"text_input": ' + b"[" * 500_000 + b"]" * 500_000 + b"}"
    url = f"http://{server.info['http']}/v2/models/ensemble/generate"
    pid = server.server_pid()
    for body in (large, deep):
        with pytest.raises(urllib.request.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(url, body), timeout=30)
        assert caught.value.code == 400
    assert server.server_pid() == pid


def test_a_server_with_another_key_is_not_ours(server: Any) -> None:
    host, port = server.info["http"].split(":")
    assert ServerApi(host, int(port), 0, server.info["admin_key"]).ready()
    assert not ServerApi(host, int(port), 0, "another").ready()


def test_administration_needs_the_key(server: Any) -> None:
    import tritonclient.grpc as grpcclient
    from tritonclient.utils import InferenceServerException

    with (
        grpcclient.InferenceServerClient(server.info["grpc"]) as client,
        pytest.raises(InferenceServerException, match="restricted"),
    ):
        client.unload_model("tensorrt_llm")
    url = f"http://{server.info['http']}/v2/repository/models/tensorrt_llm/unload"
    with pytest.raises(urllib.request.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=10)
    assert caught.value.code == 403
