"""No client's text stops another client's stream, whatever is sent. Measured by the clock, so it is marked slow.

The server, its engine and the client are three processes. What the machine itself makes a stream wait is measured
first, beside as many busy processes as there are cores, and allowed for.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.servers.gap_server import PROGRAM
from tests.support.servers.held_steps import SECONDS, wait_until

MOST_SECONDS = 0.2
SIZE = 8_000_000
BUSY = "while True: pass"


class Stream(threading.Thread):
    """A client that reads an endless answer and keeps the longest time between two reads."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port = port
        self.largest, self.reads = 0.0, 0
        self.begun = threading.Event()

    def run(self) -> None:
        body = {"prompt": [1], "max_tokens": 1_000_000, "ignore_eos": True, "stream": True}
        with asked(self.port, "/v1/completions", json.dumps(body).encode()) as client:
            last = 0.0
            while client.recv(65536):
                now = time.perf_counter()
                if self.begun.is_set():
                    self.largest = max(self.largest, now - last)
                last = now
                self.reads += 1
                self.begun.set()

    def since(self) -> float:
        """Return the longest time since this was asked last."""
        largest, self.largest = self.largest, 0.0
        return largest


@contextmanager
def asked(port: int, path: str, body: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as client:
        head = f"POST {path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        yield client


def answer(port: int, path: str, body: bytes) -> int:
    """Return the status of an answer that was read to its end."""
    with asked(port, path, body) as client:
        first = client.recv(65536)
        while client.recv(1 << 20):
            pass
    return int(first.split()[1])


@contextmanager
def served() -> Iterator[int]:
    with subprocess.Popen(PROGRAM, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        yield int(server.stdout.readline())
        server.stdin.close()


@contextmanager
def busy(count: int = 2) -> Iterator[None]:
    burning = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def dumped(value: object) -> bytes:
    return json.dumps(value).encode()


HOSTILE = b'{"x":[' + b"[]," * 70 + b'"'
MESSAGE = {"role": "user", "content": []}
CALL = {"type": "function_call", "call_id": "c", "name": "f"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"enum": ["x"] * 200}}}


def bodies() -> dict[str, tuple[str, bytes]]:
    return {
        "string without an end, 24 KB": ("/v1/completions", HOSTILE + b'\\"' * 12_000),
        "string without an end, 8 MB": ("/v1/completions", HOSTILE + b'\\"' * (SIZE // 2)),
        "one text": ("/v1/completions", dumped({"prompt": "word " * (SIZE // 5)})),
        "one word": ("/v1/chat/completions", dumped({"messages": [{"role": "user", "content": "a" * SIZE}]})),
        "many messages": ("/v1/chat/completions", dumped({"messages": [MESSAGE] * (SIZE // 35)})),
        "many tools": ("/v1/chat/completions", dumped({"messages": [MESSAGE], "tools": [TOOL] * (SIZE // 1100)})),
        "token ids": ("/generate", dumped({"input_ids": [100] * (SIZE // 5)})),
        "many answers": ("/v1/completions", dumped({"prompt": "a" * 500_000, "n": 32, "max_tokens": 1})),
        "calls": ("/v1/responses", dumped({"input": [CALL] * 130_000, "max_output_tokens": 1})),
        "brackets": ("/v1/completions", b'{"x":[' + b"[]," * (SIZE // 3) + b"[]]}"),
        "names": ("/abort_request", dumped({"rid": ["a"] * (SIZE // 5)})),
        "grammar": ("/v1/completions", dumped({"prompt": "x", "guided_grammar": "\n" * 65_000})),
        "rules": (
            "/v1/completions",
            dumped(
                {"prompt": "x", "guided_grammar": "root ::= r0\n" + "".join(f"r{n}::=r{n + 1}\n" for n in range(4500))}
            ),
        ),
        "tokenize": ("/tokenize", dumped({"prompt": "a" * SIZE})),
        "detokenize": ("/detokenize", dumped({"tokens": [100] * 1_000_000})),
    }


@pytest.mark.slow
def test_no_body_stops_the_stream_of_another_client():
    with served() as port:
        stream = Stream(port)
        stream.start()
        assert stream.begun.wait(SECONDS)
        with busy():
            time.sleep(5)
            allowed = MOST_SECONDS + stream.since()
        found = {}
        for name, (path, body) in bodies().items():
            began, reads = time.perf_counter(), stream.reads
            stream.since()
            status = answer(port, path, body)
            # A stream that was stopped is not read before it goes on.
            seen = stream.reads
            wait_until(lambda seen=seen: stream.reads > seen)
            found[name] = stream.since()
            took = time.perf_counter() - began
            print(f"{name:28} {status} {took:6.2f} s, gap {found[name]:.3f} s, {stream.reads - reads} reads")
            # 503: a worker that took too long was ended.
            assert status in (200, 400, 413, 503), name
        print(f"allowed {allowed:.3f} s")
        assert stream.is_alive()
    assert {name: gap for name, gap in found.items() if gap > allowed} == {}
