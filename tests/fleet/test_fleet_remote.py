"""A router and replicas over TCP: they answer as one engine, and only to peers that know the secret."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from tests.support.fleet.doors import (
    SECRET,
    address_of,
    bodies_of,
    check_a_mac_is_good_for_one_role_one_channel_and_one_handshake,
    door,
    exchange,
    framed,
    remote,
    until,
)
from tests.support.servers.backends import (
    LONG,
    alone,
    ask,
    collect,
    in_loop,
    instant,
    real,
    started,
    tokens_of,
    varied_requests,
)
from tests.support.servers.fake_engines import answer
from tests.support.servers.held_steps import SECONDS
from weft.backends.codec import FLEET, EngineWriter, EventReader, decode_command
from weft.backends.dispatcher import Dispatcher
from weft.base.errors import EngineStopped, OptionError, RequestError
from weft.engine.events import FinishReason
from weft.engine.load import ReplicaLoad
from weft.engine.protocol import EngineNews, LoadPrompt, Question, RequestFailed, SavePrompt, Shutdown, Subscribe, Topic
from weft.fleet import listener as listener_module
from weft.fleet.backend import FleetBackend
from weft.fleet.listener import FleetListener
from weft.fleet.remote import MAX_EVENT_BYTES, UNREAD, RemoteBackend, ReplicaAddress
from weft.fleet.routing import RoutedChoice
from weft.memory.journal import CacheChanges
from weft.wire.frames import ProtocolError
from weft.wire.handshake import (
    MAX_BYTES,
    Proof,
    ReplicaSide,
    RouterSide,
    Welcome,
    read_secret,
)
from weft.wire.tls import TlsFiles

WRITER = EngineWriter()
encode_command, encode_event, frame = WRITER.command, WRITER.event, WRITER.frame


@asynccontextmanager
async def connected(backend: Dispatcher, **more: object) -> AsyncIterator[tuple[RemoteBackend, FleetListener]]:
    async with started(backend), door(backend) as found, started(remote(found, **more)) as router:
        yield router, found


# answers --------------------------------------------------------------------------------------------------------------


@in_loop
async def test_answers_over_the_wire_are_those_of_the_engine_alone():
    expected = alone(varied_requests())
    async with connected(real("thread")) as (router, _):
        assert "folder" not in router.info.settings, "paths of another machine"
        for request, (outputs, report) in zip(varied_requests(), expected, strict=True):
            found, reported = await collect(await router.submit(request))
            report.queued_seconds = reported.queued_seconds
            assert (found, reported) == (outputs, report)
        assert (await router.cache_report(5))["cached_tokens"] > 0
        assert await router.flush() == 0
        assert (await router.stats())["open"] == 0


@in_loop
async def test_requests_at_fault_full_replicas_aborts_and_stops_are_carried_over():
    async with connected(instant("thread", 0.002, max_open=2)) as (router, _):
        with pytest.raises(RequestError, match="prompt must have token ids") as caught:
            await router.submit(ask([256], 2))
        assert (caught.value.status, caught.value.field) == (400, "prompt")
        streams = [await router.submit(ask([20], LONG)) for _ in range(2)]
        with pytest.raises(RequestError) as caught:
            await router.submit(ask([20], 5))
        assert caught.value.status == 429
        router.abort(streams[0])
        router.finish(streams[1])
        ends = [(await collect(stream))[0][-1].finish for stream in streams]
        assert ends == [FinishReason.ABORT, FinishReason.STOP]
        submitting = asyncio.ensure_future(router.submit(ask([2], LONG)))
        await asyncio.sleep(0)
        submitting.cancel()
        await until(lambda: router.open == 0)


@in_loop
async def test_a_router_that_vanishes_aborts_its_requests():
    backend = instant("thread", 0.002)
    async with started(backend), door(backend) as found:
        router = remote(found)
        await router.start()
        stream = await router.submit(ask([20], LONG))
        await anext(stream)
        await router.stop(0)
        await until(lambda: backend.open == 0)
        assert (await backend.stats())["aborts"] == 1
        assert not found.routers


@in_loop
async def test_a_lost_replica_fails_its_requests_and_is_connected_again():
    backend = instant("thread", 0.002)
    async with started(backend), door(backend) as found, started(remote(found)) as router:
        stream = await router.submit(ask([20], LONG))
        await anext(stream)
        info = router.info
        next(iter(found.routers)).abort()
        with pytest.raises(EngineStopped, match="connection to the replica is lost"):
            await collect(stream)
        await until(lambda: router.healthy)
        assert router.info is not info
        assert await tokens_of(router, ask([3], 5)) == answer([3], 5)


@in_loop
async def test_a_replica_whose_engine_dies_fails_single_requests_which_the_fleet_retries():
    dying, other = instant("process", 0.002), instant("thread")
    async with started(dying), started(other), door(dying) as one, door(other) as two:
        members = [("one", remote(one)), ("two", remote(two))]
        async with started(FleetBackend(members, patient=True, check_seconds=None)) as fleet:
            await until(lambda: all(member.takes_requests for member in fleet.members))
            streams = [await fleet.submit(ask([20], LONG)) for _ in range(2)]
            for stream in streams:
                await anext(stream)
            os.kill(dying.process_id, 9)
            begun = next(stream for stream in streams if stream.member.name == "one")
            with pytest.raises(EngineStopped):
                await collect(begun)
            found = await asyncio.gather(*(tokens_of(fleet, ask([30], 5)) for _ in range(4)))
            assert found == [answer([30], 5)] * 4
            for stream in streams:
                fleet.abort(stream)


@in_loop
async def test_the_router_mirrors_a_remote_cache_and_sends_prefixes_where_they_are():
    one, two, choice = real("thread"), real("thread"), RoutedChoice()
    async with started(one), started(two), door(one) as first, door(two) as second:
        members = [("one", remote(first)), ("two", remote(second))]
        async with started(FleetBackend(members, patient=True, chooser=choice, check_seconds=None)) as fleet:
            await until(lambda: all(member.takes_requests for member in fleet.members))
            request = varied_requests()[0]
            stream = await fleet.submit(request)
            holder = stream.member
            await collect(stream)
            mirror = choice.router.replicas[holder.name].mirror
            await until(lambda: choice.router.index.held(mirror))
            stream = await fleet.submit(request)
            assert stream.member is holder
            assert (await collect(stream))[1].cached_tokens == 128
            assert holder.saved_tokens == 128


@in_loop
async def test_a_gap_in_the_news_starts_the_mirror_over():
    backend, choice = real("thread"), RoutedChoice()
    async with started(backend), door(backend) as found:
        fleet = FleetBackend([("one", remote(found))], chooser=choice, check_seconds=None)
        async with started(fleet):
            await collect(await fleet.submit(varied_requests()[0]))
            mirror = choice.router.replicas["one"].mirror
            await until(lambda: choice.router.index.held(mirror))
            # One batch is lost, as if the router had read too slowly.
            session = next(iter(found.routers))._session
            lost: list[EngineNews] = []
            hear, fresh = session._hear, []

            def losing(news: EngineNews) -> None:
                if news.changes is not None and not lost:
                    lost.append(news)
                else:
                    fresh.append(news.changes is not None and news.changes.fresh)
                    hear(news)

            backend._subscribers[:] = [losing]
            session._hear = losing
            await collect(await fleet.submit(ask(list(range(100, 230)), 5)))
            await until(lambda: lost)
            assert not lost[0].changes.fresh
            await collect(await fleet.submit(ask(list(range(20, 150)), 5)))
            kept = (await backend.stats())["resume_points"]
            await until(lambda: len(choice.router.index.held(mirror)) == kept)
            assert fresh.count(True) == 1


# peers that do not know the secret ------------------------------------------------------------------------------------


@in_loop
async def test_a_router_with_a_wrong_secret_gets_nothing_and_says_why(caplog):
    async with started(instant("thread")) as backend, door(backend) as found:
        router = remote(found, b"another secret of thirty-two characters...")
        starting = asyncio.ensure_future(router.start())
        await until(lambda: "does not know the secret" in caplog.text)
        assert not found.routers
        assert not starting.done()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await router.stop(0)


@in_loop
async def test_a_replica_that_does_not_know_the_secret_is_not_trusted(caplog):
    async with started(instant("thread")) as backend, door(backend, secret=b"x" * 40) as found:
        # It lets every router in.
        class Lax(ReplicaSide):
            def welcome(self, body: bytes) -> bytes:
                return framed(Welcome(bytes(32)))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(listener_module, "ReplicaSide", Lax)
            router = remote(found)
            starting = asyncio.ensure_future(router.start())
            await until(lambda: "does not know the secret" in caplog.text)
            assert not router.healthy
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await router.stop(0)


@in_loop
async def test_before_the_handshake_nothing_else_is_read():
    async with started(instant("thread")) as backend, door(backend) as found:
        garbage = Proof(4, bytes(32), bytes(32))
        for data in (
            encode_command(Question(1, Topic.STATS)),
            framed(garbage),
            b"GET / HTTP/1.1\r\n\r\n",
            (MAX_BYTES + 1).to_bytes(4, "big"),
            b"\0\0\0\x10" + bytes(1 << 16),
        ):
            _, rest = await exchange(found, data)
            assert rest == b""
        assert not found.routers
        await until(lambda: found.strangers == 0)


@in_loop
async def test_a_handshake_that_is_left_half_open_is_cut_off():
    async with started(instant("thread")) as backend, door(backend, handshake_seconds=0.05) as found:
        for data in (b"", b"\0\0"):
            _, rest = await exchange(found, data)
            assert rest == b""
        await until(lambda: found.strangers == 0)


@in_loop
async def test_strangers_cannot_keep_a_router_out(monkeypatch):
    monkeypatch.setattr(listener_module, "MAX_STRANGERS", 3)
    async with started(instant("thread")) as backend, door(backend, handshake_seconds=SECONDS) as found:
        place = address_of(found)
        waiting = [await asyncio.open_connection(place.host, place.port) for _ in range(8)]
        await until(lambda: found.strangers == 3)
        async with started(remote(found)) as router:
            assert await tokens_of(router, ask([3], 5)) == answer([3], 5)
        for _, writer in waiting:
            writer.close()


@in_loop
async def test_the_number_of_routers_is_bounded():
    async with started(instant("thread")) as backend, door(backend, max_routers=1) as found, started(remote(found)):
        second = remote(found)
        starting = asyncio.ensure_future(second.start())
        side = RouterSide(SECRET, FLEET)
        place = address_of(found)
        reader, writer = await asyncio.open_connection(place.host, place.port)
        hello = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
        writer.write(side.proof(hello))
        assert await reader.read() == b""
        writer.close()
        assert not starting.done()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await second.stop(0)


@in_loop
async def test_oversized_and_damaged_frames_of_a_router_end_its_connection_only():
    async with started(instant("thread")) as backend, door(backend) as found:
        place = address_of(found)
        # Files are for a front on the engine's machine.
        own = [
            encode_command(each)
            for each in (Shutdown(), LoadPrompt(1, "/etc/passwd"), SavePrompt(1, ask([3], 0), "/x"))
        ]
        for bad in ((1 << 31).to_bytes(4, "big"), b"\0\0\0\x01\xc1", *own):
            reader, writer = await asyncio.open_connection(place.host, place.port)
            hello = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
            writer.write(RouterSide(SECRET, FLEET).proof(hello))
            await until(lambda: found.routers)
            writer.write(bad)
            await reader.read()
            writer.close()
            await until(lambda: not found.routers)
        async with started(remote(found)) as router:
            assert await tokens_of(router, ask([3], 5)) == answer([3], 5)


@in_loop
async def test_a_router_survives_a_replica_that_sends_too_much(caplog):
    """Before it has proved itself, and after."""
    seen: list[int] = []

    async def hostile(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(1)
        side = ReplicaSide(SECRET, FLEET)
        if len(seen) == 1:
            writer.write((1 << 20).to_bytes(4, "big") + bytes(1 << 10))
        else:
            writer.write(side.hello())
            proof = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
            writer.write(side.welcome(proof) + (MAX_EVENT_BYTES + 1).to_bytes(4, "big"))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hostile, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    router = RemoteBackend(ReplicaAddress("127.0.0.1", port), SECRET, first_pause_seconds=0.01)
    starting = asyncio.ensure_future(router.start())
    await until(lambda: len(seen) >= 3)
    assert f"frame has {MAX_EVENT_BYTES + 1} bytes; the limit is {MAX_EVENT_BYTES}" in caplog.text
    assert MAX_EVENT_BYTES <= 1 << 24
    assert not router.healthy
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await router.stop(0)
    server.close()


@in_loop
async def test_a_replica_that_does_not_read_gets_no_more_requests():
    """Its connection stays, and a fleet asks another replica. What waits for it is bounded."""
    stopped = asyncio.Event()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        side = ReplicaSide(SECRET, FLEET)
        writer.write(side.hello())
        proof = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
        writer.write(side.welcome(proof) + frame(engine.info))
        writer.transport.pause_reading()
        await stopped.wait()
        writer.close()

    async with started(instant("thread")) as engine:
        server = await asyncio.start_server(deaf, "127.0.0.1", 0)
        router = RemoteBackend(ReplicaAddress("127.0.0.1", server.sockets[0].getsockname()[1]), SECRET)
        await router.start()
    large = ask([1] * (1 << 20), 1)
    sent: list[asyncio.Task] = []
    while not any(each.done() for each in sent):
        sent.append(asyncio.ensure_future(router.submit(large)))
        await asyncio.sleep(0)
        assert len(sent) < 100
    [refused] = [each.exception() for each in sent if each.done()]
    assert (refused.status, str(refused)) == (429, UNREAD)
    assert router.healthy
    stopped.set()
    await asyncio.gather(*sent, return_exceptions=True)
    await router.stop(0)
    server.close()


def test_a_mac_is_good_for_one_role_one_channel_and_one_handshake():
    check_a_mac_is_good_for_one_role_one_channel_and_one_handshake()


@in_loop
async def test_tls_is_bound_to_the_certificate_and_needs_no_authority(tmp_path):
    trustme = pytest.importorskip("trustme")
    certificate = trustme.CA().issue_cert("127.0.0.1")
    (tmp_path / "one.pem").write_bytes(certificate.private_key_and_cert_chain_pem.bytes())
    async with started(instant("thread")) as backend, door(backend, tls=TlsFiles(str(tmp_path / "one.pem"))) as found:
        async with started(remote(found)) as router:
            assert await tokens_of(router, ask([3], 5)) == answer([3], 5)
        # A party in the middle has its own certificate; simulated by one that the replica does not know of.
        found.channel = b"another certificate"
        other = remote(found)
        starting = asyncio.ensure_future(other.start())
        await asyncio.wait([starting, asyncio.ensure_future(asyncio.sleep(0.3))], return_when="FIRST_COMPLETED")
        assert not found.routers
        assert not starting.done()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await other.stop(0)


def test_a_secret_must_be_private_and_long(tmp_path):
    file = tmp_path / "secret"
    file.write_text(SECRET.decode() + "\n")
    file.chmod(0o600)
    assert read_secret("fleet_secret", str(file)) == SECRET
    file.chmod(0o644)
    with pytest.raises(OptionError, match="other users can read it"):
        read_secret("fleet_secret", str(file))
    file.chmod(0o622)
    with pytest.raises(OptionError, match="refused"):
        read_secret("fleet_secret", str(file))
    file.chmod(0o600)
    file.write_text("short")
    with pytest.raises(OptionError, match="at least 32 characters, got 5"):
        read_secret("fleet_secret", str(file))


@pytest.mark.parametrize(
    "url", ["http://a:1", "tcp://a", "tcp://a:0", "tcp://a:99999", "tcp://a b:1", "tcp://a:1/x", ""]
)
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(OptionError, match="tcp://HOST:PORT"):
        ReplicaAddress.parse(url)


# messages -------------------------------------------------------------------------------------------------------------


def test_news_and_failures_of_requests_survive_the_wire_and_damaged_columns_are_refused():
    load = ReplicaLoad(prompt_tokens=7, prompt_pairs=1.5, waiting=2, held_bytes=9, token_seconds=3.5)
    changes = CacheChanges(5, 9, True, (b"k" * 32, b"l" * 32), (64, 128), b"\0\3", b"\1\0")
    events = [EngineNews(changes, load), EngineNews(None, load), RequestFailed(3, "gone")]
    assert [EventReader().read(bodies_of(encode_event(event))[0]) for event in events] == events
    assert [decode_command(bodies_of(encode_command(each))[0]) for each in (Subscribe(), Subscribe(False))] == [
        Subscribe(),
        Subscribe(False),
    ]
    key = b"k" * 32
    damaged = (
        ([key[1:]], [0], b"\0"),
        ([key], [-1], b"\0"),
        ([key], [], b"\0"),
        ([key], [0], b"\x09"),
        ([key] * 4097, [0] * 4097, bytes(4097)),
    )
    for keys, positions, tiers in damaged:
        held = b"\1" * len(keys)
        told = {"epoch": 1, "first": 0, "fresh": False, "keys": keys, "tokens": positions, "tiers": tiers, "held": held}
        with pytest.raises(ProtocolError):
            EventReader().read(msgspec.msgpack.encode(["news", told, load]))
