"""Stop words against a search in the whole text, whatever the token borders."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from m3trt.runtime.stop import StopMatcher

pytestmark = pytest.mark.smoke


def run(
    tokens: list[bytes], words: list[bytes], end_ids: tuple[int, ...] = ()
) -> tuple[list[list[int]], bool, int]:
    """Ids released at each step (index = id), whether it stopped, bytes to trim."""
    matcher = StopMatcher(words, end_ids)
    steps = []
    for token_id, token in enumerate(tokens):
        released = matcher.feed(token_id, token)
        steps.append(list(released.ids))
        if released.stopped:
            return steps, True, released.trim_bytes
    steps.append(list(matcher.flush()))
    return steps, False, 0


@pytest.mark.parametrize(
    ("tokens", "words", "steps", "stopped", "trim"),
    [
        pytest.param([b"a", b"b"], [], [[0], [1], []], False, 0, id="no-words"),
        pytest.param([b"x", b"END"], [b"END"], [[0], []], True, 0, id="one-token"),
        pytest.param([b"x", b"EN", b"D"], [b"END"], [[0], [], []], True, 0, id="two-tokens"),
        pytest.param([b"x", b"E", b"N", b"D"], [b"END"], [[0], [], [], []], True, 0, id="bytes"),
        pytest.param([b"xE", b"ND"], [b"END"], [[], [0]], True, 1, id="starts-mid-token"),
        pytest.param([b"xENDy"], [b"END"], [[0]], True, 4, id="inside-one-token"),
        pytest.param([b"ab", b"ENDmore"], [b"END"], [[0], []], True, 0, id="text-after"),
        pytest.param([b"EN", b"x"], [b"END"], [[], [0, 1], []], False, 0, id="false-alarm"),
        pytest.param([b"x", b"EN"], [b"END"], [[0], [], [1]], False, 0, id="flush-partial"),
        pytest.param([b"aa", b"a", b"b"], [b"aab"], [[], [], [0]], True, 1, id="self-overlap"),
        pytest.param([b"ab", b"c"], [b"abcd", b"bc"], [[], [0]], True, 1, id="first-to-finish"),
        pytest.param([b"a", b"b"], [b"b", b"ab"], [[], []], True, 0, id="longest-of-same-end"),
        pytest.param([b"", b"E", b"", b"ND"], [b"END"], [[0], [], [], []], True, 0, id="empty"),
        pytest.param(
            ["é".encode()[:1], "é".encode()[1:], b"z"],
            ["éz".encode()],
            [[], [], []],
            True,
            0,
            id="multi-byte-character",
        ),
        pytest.param(
            ["日本".encode()[:4], "日本".encode()[4:]],
            ["本".encode()],
            [[], [0]],
            True,
            1,
            id="split-character",
        ),
    ],
)
def test_cases(
    tokens: list[bytes], words: list[bytes], steps: list[list[int]], stopped: bool, trim: int
) -> None:
    assert run(tokens, words) == (steps, stopped, trim)


def test_end_id_releases_what_was_held() -> None:
    assert run([b"x", b"EN", b"!"], [b"END"], end_ids=(2,)) == ([[0], [], [1]], True, 0)


def first_match(text: bytes, words: list[bytes]) -> int | None:
    """Where the stop word that is complete first starts (the longest, if several are)."""
    for end in range(1, len(text) + 1):
        starts = [end - len(word) for word in words if text[:end].endswith(word)]
        if starts:
            return min(starts)
    return None


def check(tokens: list[bytes], words: list[bytes]) -> None:
    steps, stopped, trim = run(tokens, words)
    fed = tokens[: len(steps)] if stopped else tokens
    text = b"".join(fed)
    ids = list(itertools.chain(*steps))
    assert ids == list(range(len(ids)))
    shown = b"".join(tokens[i] for i in ids)
    shown = shown[: len(shown) - trim]
    start = first_match(text, words)
    assert stopped == (start is not None)
    if start is not None:
        assert first_match(b"".join(fed[:-1]), words) is None
        assert trim == 0 or trim < len(tokens[ids[-1]])
        assert shown == text[:start]
    else:
        assert shown == text
    # Nothing early: what was out after each step can have no part of any possible match.
    out = 0
    for count, released in enumerate(steps[:-1], 1):
        out += len(released)
        so_far, visible = b"".join(tokens[:count]), len(b"".join(tokens[:out]))
        for word in words:
            for k in range(1, len(word)):
                if so_far.endswith(word[:k]):
                    assert visible <= len(so_far) - k
    # And nothing late: the first id held is needed for some possible match.
    matcher = StopMatcher(words, ())
    for count, token in enumerate(tokens, 1):
        if matcher.feed(count - 1, token).stopped:
            break
        so_far = b"".join(tokens[:count])
        pending = max(
            (k for w in words for k in range(1, len(w)) if so_far.endswith(w[:k])), default=0
        )
        ends = np.cumsum([len(t) for t in tokens[:count]])
        assert len(matcher._held) == int((ends > len(so_far) - pending).sum())


@pytest.mark.parametrize("seed", range(4))
def test_random_streams(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(400):
        alphabet = b"ab" if rng.random() < 0.5 else "aé日".encode()

        def piece(low: int, high: int, alphabet: bytes = alphabet) -> bytes:
            return bytes(rng.choice(list(alphabet), rng.integers(low, high)).tolist())

        check(
            [piece(0, 5) for _ in range(rng.integers(1, 9))],
            [piece(1, 7) for _ in range(rng.integers(0, 4))],
        )


def test_all_splits_of_a_text() -> None:
    text, words = b"aabaabaaab", [b"aabaaa", b"baab"]
    for cuts in itertools.product([0, 1], repeat=len(text) - 1):
        borders = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(text)]
        check([text[a:b] for a, b in itertools.pairwise(borders)], words)
