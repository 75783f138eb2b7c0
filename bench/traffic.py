"""Clients of a soak test: threads that ask a server all the time, each in its own way."""

from __future__ import annotations

import base64
import io
import json
import random
import threading
import traceback
import urllib.error
import urllib.request
from collections import Counter
from http.client import HTTPResponse
from typing import Any

from PIL import Image

CLIENTS = {"text": 2, "stream": 2, "picture": 2, "hang_up": 2, "wrong": 1}
"""Threads of each kind."""
TIMEOUT_S = 120
QUESTION: dict[str, Any] = {"text_input": "Why is the sky blue?", "max_tokens": 16}
"""Asked again and again: its greedy answer must never change, whatever runs beside it."""
WRONG: list[dict[str, Any]] = [
    {"text_input": ""},
    {"max_tokens": 0},
    {"max_tokens": 1 << 30},
    {"temperature": -1.0},
    {"image_url_input": "data:image/png;base64,AAAA"},
    {"image_url_input": "file:///etc/hosts"},
]


class Traffic:
    """`with Traffic(address):` keeps all clients running; what they meet is in `problems`."""

    def __init__(self, address: str) -> None:
        self.done: Counter[str] = Counter()
        self.problems: list[str] = []
        self._url = f"http://{address}/v2/models"
        self._answer: str | None = None
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(kind, random.Random(f"{kind} {number}")))
            for kind, count in CLIENTS.items()
            for number in range(count)
        ]

    def __enter__(self) -> Traffic:
        self._answer = self._generate("ensemble", QUESTION)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S + 10)
        alive = sum(thread.is_alive() for thread in self._threads)
        if alive:
            self.problems.append(f"{alive} clients still wait for an answer")

    def __str__(self) -> str:
        return ", ".join(f"{kind} {count}" for kind, count in sorted(self.done.items()))

    def mix(self) -> dict[str, int]:
        """The number of clients of each kind."""
        return dict(CLIENTS)

    def _run(self, kind: str, rng: random.Random) -> None:
        ask = getattr(self, f"_ask_{kind}")
        while not self._stop.is_set() and not self.problems:
            try:
                ask(rng)
            except Exception:  # of any kind: a soak reports whatever goes wrong
                self.problems.append(f"{kind}: {traceback.format_exc(limit=3)}")
            else:
                self.done[kind] += 1

    # ---- one request of each kind --------------------------------------------------------------

    def _ask_text(self, rng: random.Random) -> None:
        if rng.random() < 0.5:
            found = self._generate(_entry(rng), QUESTION)
            _check(found == self._answer, f"{QUESTION} got {found!r}, first {self._answer!r}")
        else:
            self._generate(_entry(rng), _body(rng))

    def _ask_stream(self, rng: random.Random) -> None:
        with self._open(f"{_entry(rng)}/generate_stream", _body(rng) | {"stream": True}) as reply:
            events = [json.loads(line[len(b"data: ") :]) for line in reply if line.strip()]
        _check(all("text_output" in event for event in events), f"events {events[-1:]}")
        _check(events[-1]["finish_reason"] in ("stop", "length"), f"last event {events[-1]}")

    def _ask_picture(self, rng: random.Random) -> None:
        pictures = [_picture(rng) for _ in range(rng.choice([1, 1, 2]))]
        self._generate(_entry(rng), _body(rng) | {"image_url_input": pictures})

    def _ask_hang_up(self, rng: random.Random) -> None:
        body = _body(rng) | {"stream": True, "max_tokens": 300, "end_id": -1}
        body.pop("stop_words", None)
        if rng.random() < 0.3:
            body["image_url_input"] = [_picture(rng)]
        with self._open("tensorrt_llm_bls/generate_stream", body) as reply:
            for _ in range(rng.randint(1, 8)):
                line = reply.readline()
                _check(b"text_output" in line, f"{line!r} before hanging up")
                reply.readline()

    def _ask_wrong(self, rng: random.Random) -> None:
        body = QUESTION | rng.choice(WRONG)
        try:
            self._open(f"{_entry(rng)}/generate", body).close()
        except urllib.error.HTTPError as error:
            with error:
                _check(error.code == 400, f"{body}: status {error.code} {error.read()!r}")
            self._stop.wait(0.2)
        else:
            _check(False, f"{body} was not refused")

    # ---- HTTP ----------------------------------------------------------------------------------

    def _generate(self, model: str, body: dict[str, Any]) -> str:
        with self._open(f"{model}/generate", body) as reply:
            return str(json.load(reply)["text_output"])

    def _open(self, path: str, body: dict[str, Any]) -> HTTPResponse:
        request = urllib.request.Request(f"{self._url}/{path}", json.dumps(body).encode())
        reply: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)
        return reply


def _check(condition: bool, text: str) -> None:
    if not condition:
        raise RuntimeError(text)


def _entry(rng: random.Random) -> str:
    return rng.choice(["ensemble", "tensorrt_llm_bls"])


def _body(rng: random.Random) -> dict[str, Any]:
    words = ["sky", "blue", "日本", "🙂", "\n", "picture", "naïve", "1234567890"]
    text = " ".join(rng.choices(words, k=rng.randint(1, 60)))
    body: dict[str, Any] = {"text_input": text, "max_tokens": rng.randint(1, 24)}
    if rng.random() < 0.5:
        body |= {"temperature": 0.8, "top_p": 0.9, "seed": rng.getrandbits(31)}
    if rng.random() < 0.3:
        body["stop_words"] = ["e", " the"]
    return body


def _picture(rng: random.Random) -> str:
    """A data URL of noise in any size, aspect and of several formats."""
    size = rng.randint(20, 300), rng.randint(20, 300)
    form = rng.choice(["PNG", "JPEG", "WEBP"])
    buffer = io.BytesIO()
    Image.effect_noise(size, 50).convert("RGB").save(buffer, form)
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return f"data:image/{form.lower()};base64,{encoded}"
