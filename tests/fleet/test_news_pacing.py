"""A router that asks for everything anew delays neither the engine's steps nor other messages: counted, not timed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.support.hashed.rolling import rolling_spec
from tests.support.servers.backends import ask
from tests.support.servers.fake_engines import VOCABULARY, InstantEngine
from weft.backends.codec import EventReader
from weft.engine.load import ReplicaLoad
from weft.engine.protocol import (
    Command,
    EngineNews,
    Event,
    Outputs,
    Question,
    Replies,
    Shutdown,
    Submit,
    Subscribe,
    Topic,
)
from weft.engine.service import CHANGES_PER_STEP, Service
from weft.fleet import session as session_module
from weft.fleet.session import MAX_UNREAD_NEWS, RouterSession
from weft.memory.cache import Cache
from weft.memory.journal import CacheChanges, Journal, Tier
from weft.memory.ledger import Ledger
from weft.memory.trie import Node
from weft.wire.frames import Frames

CELLS = 10 * CHANGES_PER_STEP + 7


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def filled(cells: int, recurrent: bool = False) -> Cache:
    """A cache of this many cells, each its own path and without a resume point."""
    cache = Ledger(rolling_spec(recurrent=recurrent), 1 << 14, seats=1, max_length=64).cache
    for number in range(cells):
        cache.trie.insert(key_of(number), None, None, 0)
    return cache


def journal_of(device: Cache, host: Cache) -> Journal:
    links = [SimpleNamespace(name="host", lower=host, discovery=None)]
    return Journal(SimpleNamespace(cache=device, tiers=SimpleNamespace(chain=links)))


class CountedNode(Node):
    """Counts how often a journal looks at its key or its resume point."""

    looks = 0

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        type(self).looks = 0

    @property
    def older(self) -> Node | None:
        type(self).looks += 1
        return self._older

    @older.setter
    def older(self, node: Node | None) -> None:
        self._older = node


def test_a_batch_looks_at_a_bounded_number_of_cells_even_if_none_is_listed(monkeypatch):
    """Cells of host memory without a resume point are not published."""
    monkeypatch.setattr("weft.memory.trie.Node", CountedNode)
    device, host = filled(500), filled(5000, recurrent=True)
    journal = journal_of(device, host)
    looks = []
    before = CountedNode.looks
    journal.restart()
    looks.append(CountedNode.looks - before)
    listed: list[bytes] = []
    while True:
        before = CountedNode.looks
        batch = journal.take(100)
        if batch is None:
            break
        looks.append(CountedNode.looks - before)
        listed += batch.keys
    assert looks[0] == 0, "the start is free"
    assert max(looks) <= 100
    assert len(looks) == 1 + 55
    assert sorted(listed) == [key_of(number) for number in range(500)]


def test_cells_that_come_and_go_while_the_rest_is_listed_are_neither_lost_nor_listed_twice():
    device = filled(100)
    journal = journal_of(device, filled(0))
    journal.restart()
    held: dict[bytes, bool] = {}
    new = 100
    while (batch := journal.take(7)) is not None:
        for key, kept in zip(batch.keys, batch.held, strict=True):
            assert held.get(key, False) != bool(kept), "it is published twice, or dropped without being published"
            held[key] = bool(kept)
        nodes = device.trie.nodes
        if new < 140:
            ahead = [walk.ahead for walk in device.trie.walks]
            for victim in (next(iter(nodes.values())), nodes[max(nodes)], *ahead):
                if victim is not None and victim.key in nodes:
                    device.trie.cut(victim)
                    if held.get(victim.key):
                        device.changed(victim, held=False, point=True)
            device.changed(device.trie.insert(key_of(new), None, None, 0), held=True, point=True)
            new += 1
    assert {key for key, kept in held.items() if kept} == set(device.trie.nodes)


class ScriptedInbox:
    """Asks a question at every border, and shuts the service down once everything is listed."""

    def __init__(self, first: list[Command], done: object) -> None:
        self._first, self._done, self._asked = first, done, 0

    def take(self, wait: bool) -> list[Command]:
        commands, self._first = self._first, []
        self._asked += 1
        return [*commands, Question(1000 + self._asked, Topic.PULSE), *([Shutdown()] if self._done() else [])]

    def put(self, command: object) -> None:
        raise AssertionError("no request of this test is prepared")


def test_between_two_steps_a_bounded_number_of_changes_is_sent_and_every_question_answered():
    engine, events = InstantEngine(), []
    engine.journal = journal_of(filled(CELLS), filled(0))
    service = Service(engine, events.append, VOCABULARY)
    inbox = ScriptedInbox([Submit(0, ask([20], 10_000)), Subscribe()], lambda: listed(events) >= CELLS)
    assert service.run(inbox)
    turns: list[list[Event]] = [[]]
    for event in events:
        turns[-1].append(event)
        if isinstance(event, Outputs):
            turns.append([])
    sizes = [sum(len(event.changes.keys) for event in turn if has_changes(event)) for turn in turns]
    assert max(sizes) == CHANGES_PER_STEP
    assert sum(size > 0 for size in sizes) == 11, "a step lies between two parts"
    assert all(sum(isinstance(event, Replies) for event in turn) == 1 for turn in turns[:-1]), "at every border"


def has_changes(event: Event) -> bool:
    return isinstance(event, EngineNews) and event.changes is not None


def listed(events: list[Event]) -> int:
    return sum(len(event.changes.keys) for event in events if has_changes(event))


# routers that read slowly ---------------------------------------------------------------------------------------------


class Subscriptions:
    """A backend that counts how often its news start over."""

    info = None

    healthy = True

    def __init__(self) -> None:
        self.count = 0

    def subscribe(self, hear: Callable[[EngineNews], None]) -> None:
        self.count += 1
        self.hear = hear


class SlowRouter:
    """A session whose router reads when a test says so."""

    def __init__(self) -> None:
        self.backend, self.sent, self.unread = Subscriptions(), [], 0
        self.session = RouterSession(self.backend, self._write, lambda: self.unread)
        self.session.receive(Subscribe())

    def _write(self, data: bytes) -> None:
        self.unread += len(data)
        self.sent += [EventReader().read(body) for body in Frames().feed(data)]

    def read(self) -> None:
        self.unread = 0
        self.session.drained()

    def news(self, first: int, count: int = 1000) -> EngineNews:
        keys = tuple(key_of(number) for number in range(first, first + count))
        changes = CacheChanges(1, first, first == 0, keys, (64,) * count, bytes([Tier.DEVICE]) * count, b"\1" * count)
        return EngineNews(changes, ReplicaLoad())


def test_news_wait_for_a_slow_router_and_other_messages_pass_them():
    router = SlowRouter()
    for first in range(0, 50_000, 1000):
        router.backend.hear(router.news(first))
        assert router.unread <= MAX_UNREAD_NEWS + 50_000
    router.backend.hear(EngineNews(None, ReplicaLoad(waiting=1)))
    router.backend.hear(EngineNews(None, ReplicaLoad(waiting=2)))
    assert len(router.sent) == 2, "the rest waits"
    router.session.receive(Question(7, Topic.PULSE))
    assert router.sent[-1] == Replies(answers={7: None}), "at once"
    reads = 0
    while router.sent[-1] != EngineNews(None, ReplicaLoad(waiting=2)):
        router.read()
        reads += 1
    assert reads > 10
    changes = [event.changes for event in router.sent if has_changes(event)]
    assert [each.first for each in changes] == list(range(0, 50_000, 1000)), "all of them, in order"
    assert router.backend.count == 1, "nothing starts over"
    assert len(router.sent) == 52, "the older report of the load was left out"


def test_a_router_that_is_too_far_behind_starts_over_once_it_has_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session_module, "MOST_WAITING_CHANGES", 10_000)
    router = SlowRouter()
    for first in range(0, 50_000, 1000):
        router.backend.hear(router.news(first))
    assert router.backend.count == 1
    router.read()
    assert router.backend.count == 2
    assert len(router.sent) == 2
    router.backend.hear(router.news(0))
    assert router.sent[-1].changes.fresh


def test_a_router_that_starts_over_gets_nothing_of_the_stream_before():
    router = SlowRouter()
    for first in range(0, 10_000, 1000):
        router.backend.hear(router.news(first))
    router.session.receive(Subscribe())
    before = len(router.sent)
    router.read()
    assert len(router.sent) == before
