"""Cache events in vLLM's shape: what a subscriber of theirs decodes, and that no prompt is in it."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
import pytest

from tests.support.servers.backends import collect, in_loop, real, started, varied_requests
from weft.base.errors import OptionError
from weft.base.grid import CELL
from weft.engine.load import ReplicaLoad
from weft.engine.protocol import EngineNews
from weft.fleet import kv_events
from weft.fleet.kv_events import KvEventPublisher, publishing
from weft.memory.journal import CacheChanges, Tier
from weft.memory.keys import PrefixIdentity

KEYS = tuple(bytes([number]) * 32 for number in range(1, 5))


def number_of(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")


def test_a_batch_is_an_array_of_time_maps_and_rank_behind_its_number():
    sent: list[list[bytes]] = []
    publisher = KvEventPublisher(sent.append, clock=lambda: 7.5)
    tiers = bytes([Tier.PAGE, Tier.PAGE, Tier.DEVICE, Tier.DISK])
    changes = CacheChanges(1, 0, True, KEYS, (64, 128, 128, 192), tiers, bytes([1, 1, 1, 0]))
    load = ReplicaLoad(point_bytes=1)
    publisher.hear(3, EngineNews(changes, load))
    publisher.hear(3, EngineNews(None, load))
    publisher.hear(3, EngineNews(CacheChanges(1, 4, False, (), (), b"", b""), load))
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
        "kv_cache_spec_kind": "full_attention",
    }
    assert (point["type"], point["group_idx"], "kv_cache_spec_kind" in point) == ("BlockStored", 1, False)
    assert removed == {"type": "BlockRemoved", "block_hashes": [number_of(KEYS[3])], "medium": "DISK", "group_idx": 1}


# The types of a subscriber, with the options and fields that vLLM 0.28 declares in vllm/distributed/kv_events.py.


class TheirBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class TheirEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(TheirEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(TheirEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(TheirEvent):
    pass


class TheirKvBatch(TheirBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


def test_a_subscriber_written_for_vllm_decodes_every_field():
    sent: list[list[bytes]] = []
    publisher = KvEventPublisher(sent.append, clock=lambda: 7.5)
    tiers = bytes([Tier.PAGE, Tier.DEVICE, Tier.HOST, Tier.DISK])
    changes = CacheChanges(1, 0, True, KEYS, (64, 64, 128, 192), tiers, bytes([1, 1, 1, 0]))
    publisher.hear(3, EngineNews(changes, ReplicaLoad(point_bytes=1)))
    topic, number, payload = sent[0]
    assert (topic, int.from_bytes(number, "big")) == (b"", 0)
    hashes = [[number_of(key)] for key in KEYS]
    stored = {"parent_block_hash": None, "token_ids": [], "block_size": CELL, "lora_id": None, "lora_name": None}
    page = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    assert msgspec.msgpack.decode(payload, type=TheirKvBatch, strict=True) == TheirKvBatch(
        7.5,
        [
            AllBlocksCleared(),
            BlockStored(block_hashes=hashes[0], medium="GPU", **stored, **page),
            BlockStored(block_hashes=hashes[1], medium="GPU", **stored, group_idx=1),
            BlockStored(block_hashes=hashes[2], medium="CPU", **stored, group_idx=1),
            BlockRemoved(block_hashes=hashes[3], medium="DISK", group_idx=1),
        ],
        3,
    )


def test_every_field_has_the_name_and_type_that_vllm_gives_it():
    for ours, theirs in ((kv_events.BlockStored, BlockStored), (kv_events.BlockRemoved, BlockRemoved)):
        known = {field.name: field for field in msgspec.structs.fields(theirs)}
        for field in msgspec.structs.fields(ours):
            assert field.required == known[field.name].required, field.name
        assert {name for name, field in known.items() if field.required} <= set(ours.__struct_fields__)
    assert kv_events.KvEventBatch.__struct_fields__ == TheirKvBatch.__struct_fields__


def test_cells_of_a_model_without_states_are_of_the_first_group():
    """A subscriber for models with attention only looks at no other."""
    changes = CacheChanges(1, 0, False, KEYS[:2], (64, 128), bytes([Tier.DEVICE] * 2), bytes([1, 0]))
    assert [event.group_idx for event in kv_events.events_of(changes, states=False)] == [0, 0]
    assert [event.group_idx for event in kv_events.events_of(changes, states=True)] == [1, 1]


@in_loop
async def test_a_subscriber_learns_what_an_engine_holds(caplog):
    zmq = pytest.importorskip("zmq")
    zmq_asyncio = pytest.importorskip("zmq.asyncio")
    caplog.set_level("INFO", "weft")
    request = varied_requests()[0]
    expected = {number_of(key) for key in PrefixIdentity(CELL).keys(request.prompt)}
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
