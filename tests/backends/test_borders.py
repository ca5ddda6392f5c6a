"""What an engine takes in between two steps is bounded: long prompts of one client do not delay rows of another."""

from __future__ import annotations

import socket
from collections import deque

import numpy as np

from tests.support.servers.fake_engines import VOCABULARY, InstantEngine
from weft.backends.codec import EngineWriter
from weft.base.errors import RequestError
from weft.base.sampling import SamplingParams
from weft.engine import service
from weft.engine.protocol import Command, Shutdown, Submit
from weft.engine.request import Request
from weft.engine.service import Service
from weft.server.http.errors import MAX_MESSAGE, describe
from weft.server.texts.bodies import MAX_QUOTED, wrong_type
from weft.start import engine_process
from weft.start.engine_process import SocketInbox


def asked(tokens: int, answers: int = 50) -> Request:
    return Request(np.ones(tokens, np.int32), SamplingParams(max_tokens=answers, temperature=0))


class Recorded(InstantEngine):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def add(self, request: Request, constraint: None = None) -> int:
        self.log.append(f"add {len(request.prompt)}")
        return super().add(request)

    def step(self):
        self.log.append("step")
        return super().step()


class Script:
    """Hands out commands at each border; at the end, the shutdown."""

    def __init__(self, *borders: list[Command]) -> None:
        self._borders = deque(borders)

    def take(self, wait: bool) -> list[Command]:
        return self._borders.popleft() if self._borders else [Shutdown()]

    def put(self, command: object) -> None:
        raise AssertionError("nothing is compiled here")


def test_steps_go_on_between_admissions_of_long_prompts(monkeypatch):
    monkeypatch.setattr(service, "TOKENS_PER_BORDER", 10)
    engine = Recorded()
    long = [Submit(number, asked(20)) for number in (1, 2, 3)]
    short = [Submit(number, asked(4)) for number in (4, 5, 6, 7)]
    assert Service(engine, lambda event: None, VOCABULARY).run(
        Script([Submit(0, asked(1))], long + short, [], [], [], [])
    )
    expected = ["add 1", "step", *["add 20", "step"] * 3, *["add 4"] * 3, "step", "add 4"]
    assert engine.log[: len(expected)] == expected


def test_reading_between_two_steps_is_bounded(monkeypatch):
    monkeypatch.setattr(engine_process, "READ_BYTES", 1000)
    monkeypatch.setattr(engine_process, "READ_PER_STEP_BYTES", 2000)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inbox = SocketInbox(theirs)
        sent = [Submit(number, asked(200)) for number in range(10)]
        ours.sendall(b"".join(map(EngineWriter().command, sent)))
        taken = [[command.number for command in inbox.take(wait=False)] for _ in range(20)]
    assert [number for each in taken for number in each] == list(range(10))
    assert max(map(len, taken)) <= 3


def test_errors_quote_a_bounded_part_of_what_was_sent():
    status, answer = describe(RequestError("x" * 1_000_000))
    assert (status, len(answer.error.message)) == (400, MAX_MESSAGE + 3)
    error = wrong_type("Invalid enum value '" + "x - at `$.y`" * 1000 + "' - at `$.field`")
    assert error.field == "field"
    assert len(str(error)) <= MAX_QUOTED + len("field: ")
