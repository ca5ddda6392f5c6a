"""Two peers speak the older one's version, send nothing that it does not know, and lose no request in an upgrade."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest

from tests.support.fleet.doors import SECRET, address_of, bodies_of, door, until
from tests.support.servers.backends import ask, in_loop, instant, started, tokens_of
from tests.support.servers.fake_engines import answer
from tests.support.servers.held_steps import SECONDS
from weft.backends.backend import Backend
from weft.backends.codec import FLEET, EngineWriter, EventReader, decode_command
from weft.base.errors import RequestError
from weft.base.sampling import SamplingParams
from weft.engine.events import Output, Report, VectorSum
from weft.engine.load import ReplicaLoad
from weft.engine.protocol import EngineNews, Outputs, Submit
from weft.engine.request import Request
from weft.fleet.backend import FleetBackend
from weft.fleet.listener import FleetListener
from weft.fleet.remote import RemoteBackend
from weft.wire.frames import framed
from weft.wire.handshake import HandshakeError, Hello, Proof, ReplicaSide, RouterSide
from weft.wire.messages import Message, Writer, fields_of, parts_of
from weft.wire.versions import RANKS, TRANSFER, Protocol, VersionError

FORKS = frozenset({"answered", "keeps_answer", "retain"})
ADDED = {Request: frozenset({"prediction", "send_to", "name"}) | FORKS, Output: frozenset({"digest", "drafted"})}
OLD = Protocol("fleet", 7, oldest=6)
NEW = Protocol("fleet", 8, oldest=7, added={8: ADDED})
NEXT = Protocol("fleet", 9, oldest=8, added={8: ADDED, 9: {ReplicaLoad: frozenset({"send_bytes_per_second"})}})
PREDICTED = np.array([3, 4, 5], np.int32)


def agree(router: Protocol, replica: Protocol) -> tuple[int, int]:
    """Shake hands, and return the version that each side speaks from then on."""
    here, there = RouterSide(SECRET, router), ReplicaSide(SECRET, replica)
    [hello] = bodies_of(there.hello())
    [proof] = bodies_of(here.proof(hello))
    [welcome] = bodies_of(there.welcome(proof))
    here.check(welcome)
    return here.version, there.version


@pytest.mark.parametrize(("router", "replica", "spoken"), [(NEW, OLD, 7), (OLD, NEW, 7), (NEW, NEW, 8), (NEXT, NEW, 8)])
def test_two_peers_one_version_apart_speak_the_older_one(router, replica, spoken):
    assert agree(router, replica) == (spoken, spoken)


@pytest.mark.parametrize(
    ("router", "replica"),
    [
        (NEXT, OLD),
        (OLD, NEXT),
        # The new one has given up what came before.
        (replace(NEW, oldest=8), OLD),
        (OLD, replace(NEW, oldest=8)),
        (TRANSFER, replace(TRANSFER, version=TRANSFER.version + 1, oldest=TRANSFER.version)),
        (replace(TRANSFER, version=TRANSFER.version + 1, oldest=TRANSFER.version), TRANSFER),
    ],
)
def test_other_peers_are_refused_with_one_line_that_names_both_versions(router, replica):
    with pytest.raises(VersionError, match=rf"^the peer speaks version \d of the {router.name} protocol, not \d$"):
        agree(router, replica)


def test_nobody_in_the_middle_can_make_two_peers_speak_an_older_version():
    here, there = RouterSide(SECRET, NEW), ReplicaSide(SECRET, NEW)
    [hello] = bodies_of(there.hello())
    older = msgspec.structs.replace(msgspec.msgpack.decode(hello, type=Hello), version=7)
    [proof] = bodies_of(here.proof(msgspec.msgpack.encode(older)))
    assert here.version == 7
    with pytest.raises(HandshakeError, match="secret"):
        there.welcome(proof)
    here, there = RouterSide(SECRET, NEW), ReplicaSide(SECRET, NEW)
    [proof] = bodies_of(here.proof(*bodies_of(there.hello())))
    older = msgspec.structs.replace(msgspec.msgpack.decode(proof, type=Proof), version=7)
    with pytest.raises(HandshakeError, match="secret"):
        there.welcome(msgspec.msgpack.encode(older))


def test_a_proof_for_one_protocol_is_of_no_use_in_another():
    other = replace(FLEET, name="transfer")
    with pytest.raises(HandshakeError, match="secret"):
        agree(FLEET, other)
    assert TRANSFER.strict
    assert RANKS.strict


def test_a_fork_is_refused_for_a_replica_that_knows_none() -> None:
    """Without the tokens of its answer, it would be another request."""
    fork = Request(np.array([1, 2], np.int32), SamplingParams(max_tokens=9), answered=np.array([3], np.int32))
    assert decode_command(*bodies_of(EngineWriter().command(Submit(5, fork)))).request.answered.tolist() == [3]
    with pytest.raises(RequestError, match="knows no forks"):
        EngineWriter(FLEET, 4).command(Submit(5, fork))


def test_an_embedding_is_refused_for_a_replica_that_knows_none() -> None:
    """Without its vector, the request would only compute a prompt."""
    asked = Request(np.array([1, 2], np.int32), SamplingParams(max_tokens=0, vector_from=1))
    assert decode_command(*bodies_of(EngineWriter().command(Submit(5, asked)))).request.params.vector_from == 1
    with pytest.raises(RequestError, match="knows no embeddings"):
        EngineWriter(FLEET, 5).command(Submit(5, asked))
    ended = Outputs([Output(5, None)], {5: Report(vector=VectorSum(np.ones(2, np.float32)))})
    [vector, outputs] = bodies_of(EngineWriter().event(ended))
    reader = EventReader()
    assert reader.read(vector) is None
    assert reader.read(outputs) == ended


# messages -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wheel:
    spokes: int
    hub: int = 0


class Cart(Message, tag="cart"):
    wheels: tuple[Wheel, ...]
    extra: dict[str, Wheel]
    bell: int = 0


def test_only_what_an_older_peer_knows_is_sent_to_it():
    cart = Cart((Wheel(8, 1), Wheel(9, 2)), {"spare": Wheel(7, 3)}, 5)
    newer = {Wheel: frozenset({"hub"}), Cart: frozenset({"bell"})}
    [body] = bodies_of(Writer(newer=newer).frame(cart))
    assert msgspec.msgpack.decode(body) == ["cart", [{"spokes": 8}, {"spokes": 9}], {"spare": {"spokes": 7}}]
    assert bodies_of(Writer().frame(cart)) == [msgspec.msgpack.encode(cart)]
    assert Wheel in parts_of(Cart)


def test_what_travels_without_its_newer_fields_arrives_with_their_defaults():
    writer = EngineWriter(NEW, 7)
    prompt = np.array([1, 2], np.int32)
    request = Request(prompt, SamplingParams(max_tokens=9), frozenset({7}), priority=3, prediction=PREDICTED)
    [body] = bodies_of(writer.command(Submit(5, request)))
    assert "prediction" not in msgspec.msgpack.decode(body)[2]
    found = decode_command(body)
    assert found.request.prediction is None
    assert (found.request.params, found.request.stop_tokens, found.request.priority) == (request.params, {7}, 3)
    assert found.request.prompt.tolist() == [1, 2]
    [body] = bodies_of(writer.event(Outputs([Output(1, 2, -0.5, [(2, -0.5)], digest=6)], {1: Report(miss=None)})))
    assert len(msgspec.msgpack.decode(body)[1][0]) == len(Output.__struct_fields__) - 2
    assert EventReader().read(body) == Outputs([Output(1, 2, -0.5, [(2, -0.5)])], {1: Report()})


def test_messages_without_newer_fields_are_not_rebuilt():
    news = EngineNews(None, ReplicaLoad(waiting=2))
    assert EngineWriter(NEW, 7).event(news) == EngineWriter().event(news) == framed(msgspec.msgpack.encode(news))


@pytest.mark.parametrize("protocol", [FLEET, NEW, NEXT])
def test_fields_that_a_version_adds_stand_last_and_have_defaults(protocol):
    for version, types in protocol.added.items():
        for kind, names in types.items():
            later = protocol.newer(version).get(kind, frozenset())
            known = [name for name in fields_of(kind) if name not in later]
            assert set(known[-len(names) :]) == names
            required = [each.name for each in msgspec.structs.fields(kind) if each.required] if kind is Request else []
            assert not names & set(required)


# fleets ---------------------------------------------------------------------------------------------------------------


def remote(found: FleetListener, protocol: Protocol) -> RemoteBackend:
    return RemoteBackend(address_of(found), SECRET, first_pause_seconds=0.01, protocol=protocol)


class Listening:
    """Notes the requests that a backend gets."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.requests: list[Request] = []
        self._submit = backend.submit
        backend.submit = self.submit

    async def submit(self, request: Request) -> object:
        self.requests.append(request)
        return await self._submit(request)


@in_loop
@pytest.mark.parametrize(("router", "replica", "arrives"), [(NEW, OLD, False), (OLD, NEW, True), (NEW, NEW, True)])
async def test_a_router_and_a_replica_of_neighbouring_versions_serve_requests(router, replica, arrives):
    backend = instant("thread")
    heard = Listening(backend)
    async with (
        started(backend),
        door(backend, protocol=replica) as found,
        started(remote(found, router)) as connection,
    ):
        for start in range(5):
            request = msgspec.structs.replace(ask([start], 4), prediction=PREDICTED)
            assert await tokens_of(connection, request) == answer([start], 4)
        # An old router knows no field less than its own code, which is today's.
        assert [request.prediction is not None for request in heard.requests] == [arrives] * 5
        assert (await connection.stats())["open"] == 0


@in_loop
async def test_versions_too_far_apart_never_connect(caplog):
    backend = instant("thread")
    async with started(backend), door(backend, protocol=OLD) as found:
        connection = remote(found, NEXT)
        starting = asyncio.ensure_future(connection.start())
        await until(lambda: "version 7 of the fleet protocol, not 9" in caplog.text)
        assert not connection.healthy
        assert not found.routers
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await connection.stop(0)
    assert caplog.text.count("cannot connect to") == 1


@pytest.mark.parametrize("router", [OLD, NEW])
@in_loop
async def test_a_rolling_upgrade_by_one_version_loses_no_request(router):
    """Replicas go from the old version to the new one under load, behind a router that goes first or last."""
    async with AsyncExitStack() as stack:
        doors = []
        for protocol in (OLD, OLD, NEW, NEW):
            backend = await stack.enter_async_context(started(instant("thread", 0.001)))
            doors.append(await stack.enter_async_context(door(backend, protocol=protocol)))
        members = [(str(place), remote(doors[place], router)) for place in range(2)]
        fleet = await stack.enter_async_context(started(FleetBackend(members, patient=True)))
        answered: list[bool] = []
        ending = asyncio.Event()

        async def client(number: int) -> None:
            while not ending.is_set():
                answered.append(await tokens_of(fleet, ask([number], 8)) == answer([number], 8))

        clients = asyncio.gather(*(client(20 + number) for number in range(6)))
        for place in range(2):
            fleet.add(str(2 + place), remote(doors[2 + place], router))
            await until(lambda: sum(member.takes_requests for member in fleet.members) == 3)
            fleet.remove(str(place), SECONDS)
            await until(lambda: len(fleet.members) == 2)
        most = len(answered) + 12
        await until(lambda: len(answered) >= most or clients.done())
        ending.set()
        await clients
        assert all(answered)
        assert {member.name for member in fleet.members} == {"2", "3"}
