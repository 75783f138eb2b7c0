"""Incremental detokenisation joins to the whole, however it is split."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from m3trt.preprocess.detokenizer import Detokenizer
from m3trt.preprocess.tokenizer import Tokenizer

pytestmark = pytest.mark.smoke

END = 200020
UNKNOWN = 5000
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture
def detokenizer(tokenizer: Tokenizer) -> Detokenizer:
    return Detokenizer(tokenizer)


@pytest.fixture(scope="module")
def byte_ids(tokenizer: Tokenizer) -> list[int]:
    """The id of each single byte."""
    by_bytes = {tokenizer.token_bytes(id_): id_ for id_ in range(256)}
    return [by_bytes[bytes([byte])] for byte in range(256)]


def pieces(
    detokenizer: Detokenizer, tokenizer: Tokenizer, ids: list[int], cuts: list[int]
) -> list[str]:
    """Feed `ids` as the engine does: previous ids are the last three that have bytes."""
    bounds = [0, *cuts, len(ids)]
    found = []
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        before = [id_ for id_ in ids[:start] if tokenizer.token_bytes(id_)][-3:]
        final = index == len(cuts)
        found.append(detokenizer.text(before, ids[start:stop], final=final))
    return found


def random_cuts(rng: np.random.Generator, length: int) -> list[int]:
    return sorted(rng.integers(0, length + 1, rng.integers(0, length + 2)).tolist())


@pytest.mark.parametrize(
    "text",
    ["Hello world, how are you", " leading", "naïve €5 🙂🙂 你好", "é" * 7, "👩‍👩‍👧‍👦 flag 🇩🇪"],
)
def test_any_split_of_text(detokenizer: Detokenizer, tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    one_by_one = pieces(detokenizer, tokenizer, ids, list(range(1, len(ids))))
    assert "".join(one_by_one) == text
    assert REPLACEMENT not in "".join(one_by_one)
    rng = np.random.default_rng(0)
    for _ in range(50):
        cuts = random_cuts(rng, len(ids))
        assert "".join(pieces(detokenizer, tokenizer, ids, cuts)) == text


def test_any_split_of_random_bytes(
    detokenizer: Detokenizer, tokenizer: Tokenizer, byte_ids: list[int]
) -> None:
    """Also of invalid UTF-8: lead bytes are frequent here, so that sequences break off."""
    rng = np.random.default_rng(1)
    alphabet = [0x41, 0x80, 0x9F, 0xA0, 0xBF, 0xC2, 0xE0, 0xE2, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF]
    for _ in range(2000):
        content = bytes(rng.choice(alphabet, rng.integers(1, 12)).tolist())
        ids = [byte_ids[byte] for byte in content]
        for position in rng.integers(0, len(ids) + 1, 2):
            ids.insert(int(position), UNKNOWN)
        expected = content.decode(errors="replace")
        found = pieces(detokenizer, tokenizer, ids, random_cuts(rng, len(ids)))
        assert "".join(found) == expected == tokenizer.decode(ids)


@pytest.mark.parametrize("skip", [True, False])
def test_any_split_of_random_ids(tokenizer: Tokenizer, skip: bool) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    rng = np.random.default_rng(2)
    choices = [*range(700), *[END, 200025, 200059, UNKNOWN] * 60]
    for _ in range(500):
        ids = rng.choice(choices, rng.integers(1, 30)).tolist()
        whole = detokenizer.text([], ids, final=True)
        assert whole == "".join(pieces(detokenizer, tokenizer, ids, random_cuts(rng, len(ids))))


def test_unfinished_character_is_held_back(detokenizer: Detokenizer, byte_ids: list[int]) -> None:
    first, second, third = (byte_ids[byte] for byte in "€".encode())
    assert detokenizer.text([], [first], final=False) == ""
    assert detokenizer.text([first], [second], final=False) == ""
    assert detokenizer.text([first, second], [third], final=False) == "€"
    assert detokenizer.text([first, second], [], final=True) == REPLACEMENT
    assert detokenizer.text([first], [second], final=True) == REPLACEMENT
    assert detokenizer.text([first, second], [byte_ids[0x41]], final=False) == REPLACEMENT + "A"


def test_special_tokens(tokenizer: Tokenizer, byte_ids: list[int]) -> None:
    ids = [*tokenizer.encode("Hi"), END, *tokenizer.encode(" there")]
    assert Detokenizer(tokenizer).text([], ids, final=True) == "Hi there"
    shown = Detokenizer(tokenizer, skip_special_tokens=False)
    assert shown.text([], ids, final=True) == "Hi[e~[ there"
    hidden = Detokenizer(tokenizer)
    lead, tail = byte_ids[0xC3], byte_ids[0xA9]
    assert hidden.text([], [lead, END, tail], final=True) == REPLACEMENT * 2
    assert hidden.text([], [lead, END], final=False) == REPLACEMENT
    assert hidden.text([lead, END], [tail], final=False) == REPLACEMENT


def test_trimming_a_stop_word(tokenizer: Tokenizer, byte_ids: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("the picture")
    for cut in range(len("the picture") + 1):
        found = detokenizer.text([], ids, final=True, trim_bytes=cut)
        assert found == "the picture"[: len("the picture") - cut]
    ids = tokenizer.encode("a€")
    assert detokenizer.text([], ids, final=True, trim_bytes=1) == "a" + REPLACEMENT
    assert detokenizer.text([], [*ids, END], final=True, trim_bytes=4 + 3) == "a"
    assert detokenizer.text([byte_ids[0xC3]], [byte_ids[0xA9]], final=True, trim_bytes=0) == "é"
    with pytest.raises(ValueError, match="1 more than new_ids have"):
        detokenizer.text([], ids, final=True, trim_bytes=5)
    with pytest.raises(ValueError, match="needs final"):
        detokenizer.text([], ids, final=False, trim_bytes=1)
