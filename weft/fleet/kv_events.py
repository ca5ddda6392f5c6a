"""Publishes changes of caches in the shape of vLLM's KV events, over ZeroMQ, for routers that know that shape.

A message has three parts: an empty topic, a sequence number in eight bytes, and a MessagePack batch `[time, events,
rank]`. A block is a cell; its hash is the first eight bytes of its key. Token ids are left out, because prompts could
be read from them. Group 0 are cells; group 1 are resume points, which only models with states or windows have apart.
Names of fields are those of vLLM 0.28; earlier versions had events as arrays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import groupby
from typing import Any

import msgspec

from weft.backends.backend import Backend
from weft.base.errors import OptionError
from weft.base.grid import CELL
from weft.engine.protocol import EngineNews
from weft.fleet.backend import FleetBackend
from weft.memory.journal import CacheChanges, Tier

log = logging.getLogger("weft")

LOOPBACK = ("tcp://127.0.0.1:", "tcp://localhost:", "tcp://[::1]:", "ipc://", "inproc://")
# Messages that wait for a slow subscriber; then it misses some, which it sees by their numbers.
MAX_WAITING = 10_000
# Kinds of groups, in vLLM's words, which have none for a resume point.
KINDS = ("full_attention", None)
MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "DISK", Tier.PAGE: "GPU"}


class KvEvent(msgspec.Struct, tag=True, omit_defaults=True):
    """Base of all events: a map with the event's name as `type`."""


class BlockStored(KvEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(KvEvent):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KvEvent):
    pass


class KvEventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def events_of(changes: CacheChanges, states: bool) -> Iterator[BlockStored | BlockRemoved | AllBlocksCleared]:
    """Yield the events of a batch of changes, in order; neighbours of the same kind share one.

    Without `states`, a sequence can resume at the end of every cell: then points are cells.
    """
    if changes.fresh:
        yield AllBlocksCleared()
    rows = zip(changes.keys, changes.tiers, changes.held, strict=True)
    for (tier, held), same in groupby(rows, key=lambda row: row[1:]):
        hashes = [int.from_bytes(key[:8], "big") for key, *_ in same]
        medium, group = MEDIA[Tier(tier)], int(states and tier != Tier.PAGE)
        if held:
            yield BlockStored(hashes, None, [], CELL, None, medium, None, group, KINDS[group])
        else:
            yield BlockRemoved(hashes, medium, group)


class KvEventPublisher:
    """Numbers batches and passes them to `send`, as topic, number and payload."""

    def __init__(self, send: Callable[[list[bytes]], None], clock: Callable[[], float] = time.time) -> None:
        self._send = send
        self._clock = clock
        self._number = 0
        self._encode = msgspec.msgpack.Encoder().encode

    def hear(self, rank: int, news: EngineNews) -> None:
        if news.changes is None:
            return
        batch = KvEventBatch(self._clock(), list(events_of(news.changes, bool(news.load.point_bytes))), rank)
        self._send([b"", self._number.to_bytes(8, "big"), self._encode(batch)])
        self._number += 1


@asynccontextmanager
async def publishing(endpoint: str, backend: Backend) -> AsyncIterator[None]:
    """Publish the events of a backend, or of each member of a fleet under its place, while the context is open."""
    try:
        import zmq
    except ImportError:
        raise OptionError("kv_events needs pyzmq; install it with: pip install 'weft-serve[fleet]'") from None
    if not endpoint.startswith(LOOPBACK):
        log.warning("cache events are published at %s: other machines may subscribe to them", endpoint)
    socket: Any = zmq.Context.instance().socket(zmq.PUB)
    socket.set_hwm(MAX_WAITING)
    socket.linger = 0
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise OptionError(f"cannot bind kv_events {endpoint}: {error}") from None
    log.info("publishing cache events at %s", socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def send(parts: list[bytes]) -> None:
        # A publisher never waits: subscribers that are too slow miss messages.
        socket.send_multipart(parts, zmq.NOBLOCK)

    publisher = KvEventPublisher(send)
    members = [member.backend for member in backend.members] if isinstance(backend, FleetBackend) else [backend]
    hearing = [(member, partial(publisher.hear, rank)) for rank, member in enumerate(members)]
    for member, hear in hearing:
        member.subscribe(hear)
    try:
        yield
    finally:
        for member, hear in hearing:
            member.unsubscribe(hear)
        socket.close()
