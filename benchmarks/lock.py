"""Measure how long work on client text holds the GIL: the largest gap of a ticking thread during each piece of work.

    python -m benchmarks.lock [--megabytes 8]

During a gap another thread was ready but did not run, because the work held the global interpreter lock. Work that
takes longer than its gap releases the lock in between. On a busy machine, gaps include pauses of the OS scheduler, so
look at the `idle` row first.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from weft import builtin
from weft.base.errors import RequestError
from weft.base.grammar import Grammar
from weft.server.apis.openai_chat import ChatRequest
from weft.server.apis.tokens import TokenizeRequest
from weft.server.http.errors import json_response
from weft.server.settings import Limits
from weft.server.texts.bodies import check_depth, decode
from weft.text.grammar import Grammars
from weft.text.template import ChatTemplate
from weft.text.tokenizer import Tokenizer, load_tokenizer

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}\n{% endfor %}"
Work = Callable[[], Any]


class Ticker:
    """Thread that wakes up every millisecond and records the longest time between two wake-ups."""

    def __init__(self) -> None:
        self.largest = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Ticker:
        self._thread.start()
        time.sleep(0.02)
        self.largest = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(0.005)
        self._done.set()
        self._thread.join()

    def _tick(self) -> None:
        last = time.perf_counter()
        while not self._done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            self.largest = max(self.largest, now - last)
            last = now


def measured(work: Work) -> tuple[float, float]:
    """Return the seconds that the work takes, and the largest gap meanwhile."""
    with Ticker() as ticker:
        began = time.perf_counter()
        work()
        took = time.perf_counter() - began
    return took, ticker.largest


def words(size: int) -> str:
    return ("The quick brown fox jumps over the lazy dog, and 42 more things happen. " * (size // 70 + 1))[:size]


def text_works(size: int, tokenizer: Tokenizer) -> dict[str, Work]:
    text, limits = words(size), Limits()
    body = json.dumps({"prompt": text}).encode()
    turns = [{"role": "user", "content": "[" + text[: max(size // 4096, 1)]}] * 4096
    chat = json.dumps({"messages": turns}).encode()
    many = b'{"messages":[' + b",".join([b'{"role":"user","content":[]}'] * (size // 30)) + b"]}"
    ids = tokenizer.encode(text)
    template = ChatTemplate(TEMPLATE)
    rendered = [{"role": "user", "content": text}]
    found = tokenizer.backend.encode(text)
    return {
        "check depth, one string": lambda: check_depth(b"[]" * 64 + body, 64),
        "decode, one string": lambda: decode(body, TokenizeRequest, limits),
        "decode, 4096 messages": lambda: decode(chat, ChatRequest, limits),
        "decode, messages of 30 bytes": lambda: decode(many, ChatRequest, limits),
        "decode, token ids": lambda: msgspec.json.decode(b"[" + b"1," * (size // 2) + b"1]"),
        "render, one message": lambda: template.render(rendered),
        "render, 4096 messages": lambda: template.render(turns),
        "tokenize, one text": lambda: tokenizer.encode(text),
        "tokenize, one word": lambda: tokenizer.encode("a" * size),
        "tokenize, the library": lambda: tokenizer.backend.encode_batch([text]),
        "token ids of an encoding": lambda: found.ids,
        "token ids as an array": lambda: np.asarray(ids),
        "detokenize": lambda: tokenizer.decode(ids),
        "answer of token ids": lambda: json_response(ids),
    }


def grammar_works(tokenizer: Tokenizer) -> dict[str, Work]:
    def compiled(kind: Any, text: str) -> Work:
        grammars = Grammars(tokenizer, tokenizer.size)
        grammars.warm()

        def work() -> None:
            with suppress(RequestError):
                grammars(Grammar(kind, text))

        return work

    members = {f"q{j}": {"properties": {f"p{i}": {} for i in range(500)}} for j in range(8)}
    schema = {"type": "object", "properties": members}
    deep = "start: " + " ".join(f"T{i}" for i in range(900)) + "\n"
    deep += "\n".join(f"T{i}: /[a-z]{{1,{i + 1}}}/" for i in range(900))
    return {
        "grammar, vocabulary": lambda: Grammars(tokenizer, tokenizer.size).warm(),
        "grammar, wide schema": compiled("json_schema", json.dumps(schema)),
        "grammar, 900 terminals": compiled("lark", deep),
        "grammar, counted regex": compiled("regex", "(a|ab|abc){1,900}(b{1,900}c){1,20}"),
        "grammar, GBNF": compiled("lark", 'root ::= "a"\n' + "".join(f'r{i} ::= "a" [0-9]+\n' for i in range(3000))),
        "grammar, newlines": compiled("lark", "\n" * 3000),
        "grammar, choices": compiled("choice", json.dumps([f"{i:060d}" for i in range(1000)])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=8.0)
    parser.add_argument("--tokenizer", default=None, help="folder with a tokenizer.json")
    chosen = parser.parse_args()
    sys.setswitchinterval(0.005)
    tokenizer = load_tokenizer(Path(chosen.tokenizer or builtin.place_of(None)))
    assert tokenizer is not None
    works: dict[str, Work] = {"idle": lambda: time.sleep(1)}
    works |= text_works(int(chosen.megabytes * (1 << 20)), tokenizer) | grammar_works(tokenizer)
    print(f"{'work':32} {'seconds':>8} {'largest gap':>12}")
    for name, work in works.items():
        took, gap = measured(work)
        print(f"{name:32} {took:8.3f} {gap:12.3f}", flush=True)


if __name__ == "__main__":
    main()
