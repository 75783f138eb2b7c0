"""The byte-level tokenizer and its reversal."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from m3trt.convert.configuration import ConfigError
from m3trt.preprocess.tokenizer import Tokenizer

pytestmark = pytest.mark.smoke

TEXTS = ["", " ", "Hello! How are you?", "你好 世界 🙂🙂", "a\n\n  b\tc\r\n", "naïve €5 ~\x00\x7f"]


def random_text(rng: np.random.Generator, length: int) -> str:
    ranges = [(0, 0x80), (0x80, 0x800), (0x800, 0xD800), (0x10000, 0x110000)]
    picked = rng.integers(0, len(ranges), length)
    return "".join(chr(rng.integers(*ranges[i])) for i in picked)


def test_bytes_join_to_the_text(tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(0)
    for text in [*TEXTS, *(random_text(rng, 40) for _ in range(100))]:
        ids = tokenizer.encode(text)
        assert b"".join(tokenizer.token_bytes(id_) for id_ in ids) == text.encode()
        assert tokenizer.decode(ids) == text


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    singles = {tokenizer.token_bytes(id_) for id_ in range(256)}
    assert singles == {bytes([byte]) for byte in range(256)}


def test_special_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("]~b]user\nx]<]start of image[>[<mm:think>[e~[")
    assert [ids[0], *ids[-3:]] == [200019, 200029, 200059, 200020]
    assert tokenizer.token_bytes(200029) == b"]<]start of image[>["
    assert tokenizer.is_special(200020)
    assert not tokenizer.is_special(200059)
    assert not tokenizer.is_special(5)
    assert tokenizer.id_of("]~!b[") == 200034


def test_unknown_ids_have_no_bytes(tokenizer: Tokenizer) -> None:
    for id_ in (5000, 200001, 200063, 10**9, 2**31, -1):
        assert tokenizer.token_bytes(id_) == b""


def test_missing_token(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"no token '<nothing>'"):
        tokenizer.id_of("<nothing>")


def test_damaged_files(release_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Tokenizer.load(tmp_path)
    path = tmp_path / "tokenizer.json"
    for content in ("", "{", "[]", '{"model": {}}'):
        path.write_text(content)
        with pytest.raises(ConfigError, match="not a valid tokenizer"):
            Tokenizer.load(tmp_path)
    data = json.loads((release_dir / "tokenizer.json").read_text())
    data["decoder"] = None
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="expected a ByteLevel decoder"):
        Tokenizer.load(tmp_path)
