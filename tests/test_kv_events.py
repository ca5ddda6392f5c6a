"""Cache events in vLLM's shape: what a subscriber of theirs decodes, and that no prompt is in it."""

from __future__ import annotations

import asyncio
import re

import msgspec
import pytest

from tests.test_backends import collect, in_loop, real, started, varied_requests
from weft.base.errors import OptionError
from weft.base.grid import CELL
from weft.engine.load import ReplicaLoad
from weft.engine.protocol import EngineNews
from weft.fleet.kv_events import KvEventPublisher, publishing
from weft.memory.journal import CacheChanges, Tier
from weft.memory.keys import chain, root_key

KEYS = tuple(bytes([number]) * 32 for number in range(1, 5))


def number_of(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")


def test_a_batch_is_an_array_of_time_maps_and_rank_behind_its_number():
    sent: list[list[bytes]] = []
    publisher = KvEventPublisher(sent.append, clock=lambda: 7.5)
    tiers = bytes([Tier.PAGE, Tier.PAGE, Tier.DEVICE, Tier.DISK])
    changes = CacheChanges(1, 0, True, KEYS, (64, 128, 128, 192), tiers, bytes([1, 1, 1, 0]))
    publisher.hear(3, EngineNews(changes, ReplicaLoad()))
    publisher.hear(3, EngineNews(None, ReplicaLoad()))
    publisher.hear(3, EngineNews(CacheChanges(1, 4, False, (), (), b"", b""), ReplicaLoad()))
    assert [parts[:2] for parts in sent] == [[b"", bytes(8)], [b"", bytes(7) + b"\x01"]]
    ts, (cleared, pages, point, removed), rank = msgspec.msgpack.decode(sent[0][2])
    assert (ts, rank, cleared) == (7.5, 3, {"type": "AllBlocksCleared"})
    assert pages == {
        "type": "BlockStored",
        "block_hashes": [number_of(key) for key in KEYS[:2]],
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": CELL,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
    }
    assert (point["type"], point["group_idx"]) == ("BlockStored", 1)
    assert removed == {"type": "BlockRemoved", "block_hashes": [number_of(KEYS[3])], "medium": "DISK", "group_idx": 1}


@in_loop
async def test_a_subscriber_learns_what_an_engine_holds(caplog):
    zmq = pytest.importorskip("zmq")
    zmq_asyncio = pytest.importorskip("zmq.asyncio")
    caplog.set_level("INFO", "weft")
    request = varied_requests()[0]
    expected = {number_of(key) for key in chain(root_key(b"", CELL), request.prompt, CELL)}
    async with started(real("thread")) as backend, publishing("tcp://127.0.0.1:*", backend):
        endpoint = re.search(r"publishing cache events at (\S+?)\0?$", caplog.text, re.MULTILINE)[1]
        socket = zmq_asyncio.Context.instance().socket(zmq.SUB)
        socket.connect(endpoint)
        socket.subscribe(b"")
        held: set[int] = set()
        while not expected <= held:
            # Subscriptions take a moment, so the snapshot is asked for until it arrives.
            await collect(await backend.submit(request))
            await backend.flush()
            if not await socket.poll(20):
                continue
            _, _, payload = await socket.recv_multipart()
            for event in msgspec.msgpack.decode(payload)[1]:
                assert not event.get("token_ids")
                held |= set(event["block_hashes"]) if event["type"] == "BlockStored" else set()
        socket.close()
    assert backend._subscribers == []


@in_loop
async def test_an_endpoint_that_cannot_be_bound_is_one_line():
    pytest.importorskip("zmq")
    async with started(real("thread")) as backend:
        with pytest.raises(OptionError, match="cannot bind kv_events"):
            async with publishing("nonsense", backend):
                await asyncio.sleep(0)
