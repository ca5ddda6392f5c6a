"""Members of a fleet without engines or processes: they act when a test says so, and fail as it says.

Answers are those of `tests.support.servers.fake_engines`: a function of the prompt, the same from every member.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.servers.fake_engines import answer, fake_info
from weft.backends.backend import ModelInfo
from weft.backends.dispatcher import Dispatcher
from weft.base.errors import EngineStopped, RequestError
from weft.base.sampling import SamplingParams
from weft.engine.events import FinishReason, Output, Report
from weft.engine.protocol import Command, Drop, End, Outputs, Question, Refusal, Replies, Submit, Topic
from weft.engine.request import Request
from weft.fleet.backend import FleetBackend
from weft.fleet.choosing import LeastOpen
from weft.fleet.member import Member

# A prompt that begins with this token is refused for its own fault.
BAD = 99
BUSY = "the limit is reached"


class FakeMember(Dispatcher):
    """Handles commands and generates a token per request whenever a test calls `step`."""

    def __init__(self, info: ModelInfo | None = None) -> None:
        super().__init__()
        self._info = info or fake_info(exact=False)
        self.inbox: deque[Command] = deque()
        self.running: dict[int, tuple[Request, int]] = {}
        self.sent: list[Request] = []
        self.accepted: list[Request] = []
        self.aborted: list[Request] = []
        self.full = self.hanging = self.sick = False
        self.starts = 0

    async def start(self) -> None:
        self.starts += 1
        self.info = self._info
        self._closed = None

    async def stop(self, drain_seconds: float) -> None:
        await self._drain(drain_seconds)

    @property
    def healthy(self) -> bool:
        return super().healthy and not self.sick

    def _send(self, command: Command) -> None:
        self.inbox.append(command)
        if isinstance(command, Submit):
            self.sent.append(command.request)

    def die(self, for_good: bool = False) -> None:
        self.inbox.clear()
        self.running.clear()
        (self._stopped if for_good else self._close)("the engine has died")

    def revive(self) -> None:
        self._closed, self.full, self.hanging, self.sick = None, False, False, False

    def step(self, generate: bool = True) -> None:
        """Handle all commands, then generate a token for every request."""
        if self.hanging or self._closed is not None:
            return
        outputs: list[Output] = []
        replies = Replies()
        while self.inbox:
            self._handle(self.inbox.popleft(), replies, outputs)
        if replies:
            self._receive(replies)
        for number, (request, done) in list(self.running.items()) if generate else ():
            token = answer(request.prompt.tolist(), done + 1)[done]
            last = done + 1 >= request.params.max_tokens
            outputs.append(Output(number, token, finish=FinishReason.LENGTH if last else None))
            self.running[number] = request, done + 1
            if last:
                del self.running[number]
        reports = {output.sequence: Report(cached_tokens=64) for output in outputs if output.finish is not None}
        if outputs:
            self._receive(Outputs(outputs, reports))

    def _handle(self, command: Command, replies: Replies, outputs: list[Output]) -> None:
        match command:
            case Submit(number, request) if request.prompt[0] == BAD:
                replies.refused.append(Refusal(number, "prompt is bad", 400, "prompt"))
            case Submit(number, request) if self.full:
                replies.refused.append(Refusal(number, BUSY, 429))
            case Submit(number, request):
                self.running[number] = request, 0
                self.accepted.append(request)
                replies.accepted.append(number)
            case End(number, stopped) if number in self.running:
                request, _ = self.running.pop(number)
                if not stopped:
                    self.aborted.append(request)
                reason = FinishReason.STOP if stopped else FinishReason.ABORT
                outputs.append(Output(number, None, finish=reason))
            case Drop(number, _, _):
                replies.answers[number] = {"dropped_tokens": {"device": 64}, "left_tokens": 0}
            case Question(number, topic):
                replies.answers[number] = self._answer(topic)

    def _answer(self, topic: Topic) -> Any:
        if topic is Topic.STATS:
            return {"open": len(self.running), "running": len(self.running), "slab_bytes": 4}
        if topic is Topic.CACHE:
            prefix = {"name": "ab", "tokens": 64, "hits": 1, "saved_tokens": 64}
            return {"cached_tokens": 128, "cell_tokens": 64, "prefixes": [prefix], "misses": []}
        return 5 if topic is Topic.FLUSH else None


class CountedChoice(LeastOpen):
    """Counts what is placed where, so that a test sees what is never ended."""

    def __init__(self) -> None:
        super().__init__()
        self.placed_now: list[int] = []

    def placed(self, number: int, request: Request, member: Member, disaggregated: bool = False) -> None:
        assert number not in self.placed_now
        self.placed_now.append(number)

    def left(self, number: int) -> None:
        self.placed_now.remove(number)

    def ended(self, number: int) -> None:
        if number in self.placed_now:
            self.placed_now.remove(number)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def ask(prompt: list[int], count: int) -> Request:
    return Request(np.array(prompt, np.int32), SamplingParams(max_tokens=count, temperature=0.0))


async def turns(count: int = 8) -> None:
    """Let all tasks run that can."""
    for _ in range(count):
        await asyncio.sleep(0)


@dataclass
class Client:
    """One request, and all that its caller saw."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: Exception | None = None
    ended: int = 0
    members_at_first_token: int | None = None

    async def run(self, fleet: FleetBackend, members: list[FakeMember], abort_after: int | None) -> None:
        try:
            stream = await fleet.submit(self.request)
            async for outputs in stream:
                if self.members_at_first_token is None:
                    self.members_at_first_token = self.attempts(members)
                self.tokens += [output.token for output in outputs if output.token is not None]
                self.finish = outputs[-1].finish or self.finish
                if abort_after is not None and len(self.tokens) >= abort_after:
                    fleet.abort(stream)
        except (EngineStopped, RequestError) as error:
            self.error = error
        self.ended += 1

    def attempts(self, members: list[FakeMember]) -> int:
        return sum(each is self.request for member in members for each in member.sent)

    def check(self, members: list[FakeMember]) -> None:
        """Fail unless the caller saw one answer, whole or a beginning of it, or a refusal."""
        count = self.request.params.max_tokens
        expected = answer(self.request.prompt.tolist(), count)
        assert self.ended == 1
        assert self.tokens == expected[: len(self.tokens)]
        assert (self.finish is None) != (self.error is None)
        assert self.finish is not FinishReason.LENGTH or len(self.tokens) == count
        if self.request.prompt[0] == BAD:
            assert self.error is not None
        if self.members_at_first_token is not None:
            assert self.attempts(members) == self.members_at_first_token, "it was sent on after its first token"


async def random_traffic(seed: int, requests: int, size: int = 3, choice: Any = None) -> dict[str, int]:
    """Serve random requests by members that fail at random; check everything; return how requests ended."""
    choose = random.Random(seed)
    members, clock, choice = [FakeMember() for _ in range(size)], Clock(), choice or CountedChoice()
    fleet = FleetBackend(
        [(str(place), member) for place, member in enumerate(members)],
        chooser=choice,
        max_open=24,
        clock=clock,
        check_seconds=None,
    )
    await fleet.start()
    clients: list[Client] = []
    tasks: list[asyncio.Task[None]] = []
    while len(clients) < requests or not all(task.done() for task in tasks):
        if len(clients) < requests and choose.random() < 0.5:
            first = BAD if choose.random() < 0.02 else choose.randrange(50)
            client = Client(ask([first, len(clients) % 251], choose.randrange(1, 6)))
            abort_after = choose.randrange(4) if choose.random() < 0.15 else None
            clients.append(client)
            tasks.append(asyncio.ensure_future(client.run(fleet, members, abort_after)))
            if choose.random() < 0.05:
                await turns(choose.randrange(3))
                tasks[-1].cancel()
                client.error, client.ended = client.error or RequestError("cancelled", 499), 1
                await asyncio.wait([tasks[-1]])
        _disturb(choose, choose.choice(members), len(clients) >= requests)
        for member in choose.sample(members, choose.randrange(size + 1)):
            member.step(generate=choose.random() < 0.7)
        clock.now += choose.random()
        fleet.check()
        await turns(choose.randrange(4))
    await _settle(fleet, members, clock)
    for client in clients:
        if client.error is None or "cancelled" not in str(client.error):
            client.check(members)
    assert fleet.open == 0
    assert not isinstance(choice, CountedChoice) or choice.placed_now == []
    assert [member.open for member in members] == [0] * size
    assert all(not member.running for member in members)
    assert all(not member.streams for member in fleet.members)
    await fleet.stop(0)
    return {
        "answered": sum(client.finish is FinishReason.LENGTH for client in clients),
        "cut": sum(client.error is not None and bool(client.tokens) for client in clients),
        "retried": sum(member.retries for member in fleet.members),
        "ejected": sum(member.ejections for member in fleet.members),
    }


def _disturb(choose: random.Random, member: FakeMember, ending: bool) -> None:
    roll = choose.random()
    if ending or roll < 0.15:
        member.revive()
    elif roll < 0.19:
        member.die()
    elif roll < 0.23:
        member.hanging = True
    elif roll < 0.26:
        member.hanging = member.sick = True
    elif roll < 0.29:
        member.full = True


async def _settle(fleet: FleetBackend, members: list[FakeMember], clock: Clock) -> None:
    """Let revived members process what still waits for them."""
    for _ in range(20):
        clock.now += 100
        for member in members:
            member.revive()
            member.step()
        fleet.check()
        await turns()
