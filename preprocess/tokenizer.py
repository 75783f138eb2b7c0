"""The checkpoint's byte-level BPE tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from m3trt.convert.configuration import ConfigError


class Tokenizer:
    """Text to ids and back; safe to use from several threads."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_of = _bytes_of_alphabet()
        self._bytes: dict[int, bytes] = {}
        added = tokenizer.get_added_tokens_decoder()
        self._added = {id_: token.content for id_, token in added.items()}
        self._special = frozenset(id_ for id_, token in added.items() if token.special)

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read `directory/tokenizer.json`.

        Raises:
            ConfigError: the file is missing, malformed or not a byte-level BPE.
        """
        path = directory / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
            decoder = json.loads(text).get("decoder")
            tokenizer = tokenizers.Tokenizer.from_str(text)
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist: copy it from the checkpoint") from None
        except Exception as error:  # tokenizers raises bare Exception on malformed content
            raise ConfigError(f"{path} is not a valid tokenizer: {error}") from error
        if '"ByteLevel"' not in json.dumps(decoder):
            raise ConfigError(f"{path}: decoder is {decoder}, expected a ByteLevel decoder")
        return cls(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens written in it are recognised, none are added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become replacement characters."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, id_: int) -> bytes:
        """The bytes that `id_` stands for; the text of a special token, b"" for an unknown id."""
        found = self._bytes.get(id_)
        if found is None:
            found = self._bytes[id_] = self._compute_bytes(id_)
        return found

    def is_special(self, id_: int) -> bool:
        """Whether the tokenizer marks `id_` as a token that readers do not see."""
        return id_ in self._special

    @property
    def max_id(self) -> int:
        """The largest id of the vocabulary."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def id_of(self, content: str) -> int:
        """The id of the single token `content`.

        Raises:
            ConfigError: the vocabulary has no such token.
        """
        id_ = self._tokenizer.token_to_id(content)
        if id_ is None:
            raise ConfigError(f"tokenizer.json has no token {content!r}, which M3 needs")
        return int(id_)

    def _compute_bytes(self, id_: int) -> bytes:
        if id_ in self._added:
            return self._added[id_].encode()
        token = self._tokenizer.id_to_token(id_) if id_ >= 0 else None
        if token is None:
            return b""
        try:
            return bytes(self._byte_of[char] for char in token)
        except KeyError:  # not spelled in the byte alphabet: the token is its own text
            return token.encode()


def _bytes_of_alphabet() -> dict[str, int]:
    """Byte-level BPE's alphabet, reversed: printable Latin-1 characters stand for themselves, the
    other bytes for the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(0x100 + i): byte for i, byte in enumerate(others)},
    }
