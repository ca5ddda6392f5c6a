"""Converts tokens to text, one at a time: never half a character, and at constant cost per token.

A vocabulary knows the bytes of each token; a UTF-8 decoder holds the beginning of a character until its end arrives. If
the decoder of a vocabulary cannot be expressed as bytes per token, the library decodes a short window instead.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

import tokenizers

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Tokens of context for the window decoder, and the maximum that it holds back for the end of a character.
CONTEXT = 6
PATIENCE = 8

BytesOf = Callable[[str], bytes]


class Detokenizer(Protocol):
    """Text of one sequence. `feed` returns what a token completes, `flush` what is left at the end."""

    def feed(self, token: int) -> str: ...

    def flush(self) -> str: ...


class Vocabulary:
    """The bytes of every token, looked up once."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        self.special = frozenset(token for token, content in added.items() if content.special)
        self._added = {token: content.content for token, content in added.items()}
        self._rule = rule_of(json.loads(backend.to_str())["decoder"])
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._look_up(token)
        return known

    def _look_up(self, token: int) -> bytes:
        if token in self._added:
            # The library would interpret an added token's letters as encoded bytes; they are literal.
            content = self._added[token]
            return content.encode() if self._rule is from_byte_level or self._rule is None else self._rule(content)
        piece = self.backend.id_to_token(token)
        if piece is None:
            return b""
        return piece.encode() if self._rule is None else self._rule(piece)

    def detokenizer(self, skip_special: bool = True, shown: Collection[str] = ()) -> Detokenizer:
        """Return a detokenizer that omits special tokens, except those in `shown`."""
        hidden = self.special if skip_special else frozenset()
        if shown:
            hidden -= {token for token in hidden if self._added[token] in shown}
        if self._rule is None:
            return WindowDetokenizer(self.backend, hidden)
        return ByteDetokenizer(self, hidden)


class ByteDetokenizer:
    def __init__(self, vocabulary: Vocabulary, hidden: frozenset[int]) -> None:
        self._bytes_of = vocabulary.bytes_of
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        return "" if token in self._hidden else self._decoder.decode(self._bytes_of(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Decodes a few tokens of context with and without the new ones; the difference is the new text."""

    def __init__(self, backend: tokenizers.Tokenizer, hidden: frozenset[int]) -> None:
        self._backend = backend
        self._hidden = hidden
        self._context: list[int] = []
        self._pending: list[int] = []

    def feed(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._pending.append(token)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._pending) < PATIENCE:
            return ""
        return self._accept(text)

    def flush(self) -> str:
        return self._accept(self._new_text()) if self._pending else ""

    def _new_text(self) -> str:
        known = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(known) :]

    def _accept(self, text: str) -> str:
        self._context = (self._context + self._pending)[-CONTEXT:]
        self._pending = []
        return text

    def _decode(self, tokens: list[int]) -> str:
        return self._backend.decode(tokens, skip_special_tokens=False)


def rule_of(decoder: dict[str, Any] | None) -> BytesOf | None:
    """Return how a tokenizer file's decoder turns one vocabulary piece into bytes; None if not piece by piece."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        return from_byte_level if set(kinds) <= {"ByteLevel", "Fuse"} else None
    swaps: list[tuple[str, str]] = []
    fused = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                swaps.append((old, new))
            case {"type": "Metaspace", "replacement": mark}:
                swaps.append((mark, " "))
            case {"type": "Fuse"}:
                fused = True
            # The decoder strips the space before a text's first word. An answer continues a prompt, so here that space
            # is an ordinary one.
            case {"type": "Strip", "content": " ", "stop": 0} if fused:
                pass
            case {"type": "ByteFallback"}:
                pass
            case _:
                return None
    return _from_pieces(swaps, "ByteFallback" in kinds)


def _from_pieces(swaps: Iterable[tuple[str, str]], byte_fallback: bool) -> BytesOf:
    swaps = tuple(swaps)

    def bytes_of_piece(piece: str) -> bytes:
        if byte_fallback and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        for old, new in swaps:
            piece = piece.replace(old, new)
        return piece.encode()

    return bytes_of_piece


def _byte_level_alphabet() -> dict[str, int]:
    """Return the character of each byte in byte-level vocabularies: itself if printable, otherwise from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF = _byte_level_alphabet()


def from_byte_level(piece: str) -> bytes:
    """
    >>> from_byte_level("\u0120caf\u00c3\u00a9").decode()
    ' café'
    """
    try:
        return bytes([BYTE_OF[character] for character in piece])
    except KeyError:
        return piece.encode()
