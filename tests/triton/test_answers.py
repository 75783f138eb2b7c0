"""Answers of a real server: every way to ask gives the same text."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from m3trt.serve.demo import draw_picture, encode_png

pytestmark = pytest.mark.full

URL = "data:image/png;base64," + base64.b64encode(encode_png(draw_picture(70))).decode()
OTHER_URL = "data:image/png;base64," + base64.b64encode(encode_png(draw_picture(140))).decode()


def test_every_way_to_ask_gives_the_same_answer(server: Any) -> None:
    expected = server.generate("ensemble", max_tokens=24).text
    assert expected
    assert server.generate("tensorrt_llm_bls", max_tokens=24).text == expected
    for model in ("ensemble", "tensorrt_llm_bls"):
        events = server.generate_stream(model, max_tokens=24)
        assert "".join(event["text_output"] for event in events) == expected
        assert [event["finish_reason"] for event in events[:-1]] == [""] * (len(events) - 1)
        assert events[-1]["finish_reason"] == "length"
        answer = server.stream(model, max_tokens=24)
        assert answer.text == expected
        assert len(answer.pieces) > 12
        assert answer.finish_reason == "length"


def test_an_unstreamed_request_gets_one_response(server: Any, entry: str) -> None:
    answer = server.stream(entry, stream=None, max_tokens=12)
    assert len(answer.pieces) == 1
    assert answer.text == server.generate(entry, max_tokens=12).text


def test_many_streams_at_once_keep_their_order(server: Any, entry: str) -> None:
    """More requests than fit into the engine, text and pictures mixed."""
    bodies: list[dict[str, Any]] = [{"text_input": f"question {i}"} for i in range(7)]
    bodies += [{"text_input": f"look {i}", "image_url_input": [URL] * (i + 1)} for i in range(2)]
    alone = [server.generate(entry, max_tokens=12, **body).text for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        streams = [pool.submit(server.stream, entry, max_tokens=12, **body) for body in bodies]
    assert [stream.result().text for stream in streams] == alone


def test_pictures_reach_the_model(server: Any, entry: str) -> None:
    def ask(**body: Any) -> tuple[int, str]:
        reply = server.generate(entry, max_tokens=16, return_num_input_tokens=True, **body)
        return reply.body["num_input_tokens"], reply.text

    tokens, text = ask()
    one, first = ask(image_url_input=URL)
    two, both = ask(image_url_input=[URL, OTHER_URL])
    placed, _ = ask(text_input="a ]<]image[>[ b ]<]image[>[ c", image_url_input=[URL, OTHER_URL])
    assert tokens < one < two
    assert placed > one
    assert len({text, first, both}) == 3


def test_raw_pixels_are_the_same_as_their_png(server: Any, entry: str) -> None:
    pixels = draw_picture(70)[np.newaxis, np.newaxis]
    answer = server.stream(entry, image_bytes_input=pixels, max_tokens=16)
    assert answer.text == server.generate(entry, image_url_input=URL, max_tokens=16).text


def test_non_ascii_text_survives_both_ways(server: Any, entry: str) -> None:
    prompt = "Grüße, 你好 🙂 "
    raw = {"text_input": prompt, "apply_chat_template": False, "exclude_input_in_output": False}
    reply = server.generate(entry, **raw)
    assert reply.text.startswith(prompt)
    assert server.stream(entry, **raw).text == reply.text


def test_a_stream_of_broken_characters_joins_to_the_whole(server: Any, entry: str) -> None:
    """Single bytes of a character in random order: unfinished characters at every border."""
    sampled = {"embedding_bias_words": ["龘ꙮ"], "embedding_bias_weights": [100.0]}
    sampled |= {"temperature": 3.0, "seed": 7, "max_tokens": 40}
    whole = server.generate(entry, **sampled).text
    assert whole.count("\N{REPLACEMENT CHARACTER}") > 10
    assert server.stream(entry, **sampled).text == whole
    assert server.generate(entry, **sampled | {"seed": 8}).text != whole


def test_stop_words_are_found_across_tokens_and_never_shown(server: Any, entry: str) -> None:
    whole = server.generate(entry, max_tokens=40).text
    middle = len(whole) // 2
    word = whole[middle - 3 : middle + 3]
    answer = server.stream(entry, max_tokens=40, stop_words=["never there", word])
    assert answer.text == whole[: whole.index(word)]
    assert answer.finish_reason == "stop"


def test_end_id_and_min_tokens(server: Any, entry: str) -> None:
    plain = server.stream("tensorrt_llm", **_direct([5, 6, 7]), request_output_len=12)
    ids = [int(arrays["output_ids"].item()) for arrays in plain.arrays if arrays["output_ids"].size]
    body = {"text_input": "x", "max_tokens": 12, "apply_chat_template": False}
    reply = server.generate(entry, **body, end_id=-1, return_num_output_tokens=True)
    assert reply.body["num_output_tokens"] == 12
    stopped = server.stream(
        "tensorrt_llm", **_direct([5, 6, 7]), request_output_len=12, end_id=ids[4]
    )
    assert stopped.finish_reason == "stop"
    assert len(stopped.arrays) <= 6


def _direct(ids: list[int]) -> dict[str, Any]:
    return {
        "text_input": None,
        "max_tokens": None,
        "stream": None,
        "streaming": True,
        "input_ids": np.array([ids], np.int32),
        "input_lengths": len(ids),
    }


def test_log_probs_and_bad_words(server: Any, entry: str) -> None:
    reply = server.generate(entry, max_tokens=6, return_log_probs=True)
    log_probs = reply.body["output_log_probs"]
    assert len(log_probs) == 6
    assert max(log_probs) < 0
    assert reply.body["cum_log_probs"] == pytest.approx(sum(log_probs), rel=1e-5)
    word = reply.text.split()[0]
    banned = server.generate(entry, max_tokens=6, bad_words=[" " + word, word])
    assert word not in banned.text
    biased = server.generate(
        entry, max_tokens=6, embedding_bias_words=["z"], embedding_bias_weights=[1000.0]
    )
    assert biased.text == "zzzzzz"


def test_clients_that_send_everything_that_tensorrt_llm_takes(server: Any, entry: str) -> None:
    """Neutral values of existing clients change nothing."""
    plain = server.stream(entry).text
    neutral = {"beam_width": 1, "pad_id": 2, "top_k": 0, "top_p": 0.0, "temperature": 0.0}
    neutral |= {"repetition_penalty": 1.0, "bad_words": "", "stop_words": ""}
    assert server.stream(entry, **neutral).text == plain
