"""A prefill and a decode engine with tiny models, connected over TCP."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from tests.support.models.engines import Answer, Ask, model_of, serve, spec_of
from weft.base.config import EngineConfig
from weft.base.sampling import SamplingParams
from weft.base.transfers import Destination
from weft.engine.events import FinishReason, Output
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.sections import sections
from weft.memory.spec import MemorySpec
from weft.memory.tiers.exchange.departures import area_bytes
from weft.runner.runner import Runner
from weft.transfer.connection import Memories
from weft.transfer.messages import Contract
from weft.transfer.tcp import TcpTransport, TransferDoor

SECRET = b"s" * 32
SECONDS = 300.0
SETTINGS = {"max_sequences": 8, "max_length": 640, "paranoid": True}


@dataclass
class EnginePair:
    prefill: Engine
    decode: Engine
    place: Destination

    def send(self, prompt: list[int], salt: bytes = b"") -> FinishReason | None:
        """Let the prefill engine compute the whole cells of a prompt, and wait until they have arrived."""
        end = (len(prompt) - 1) // 64 * 64
        if not end:
            return None
        params = SamplingParams(max_tokens=0, temperature=0.0)
        number = self.prefill.add(Request(np.array(prompt[:end], np.int32), params, salt=salt, send_to=self.place))
        outputs: list[Output] = []
        deadline = time.monotonic() + SECONDS
        while not outputs:
            assert time.monotonic() < deadline
            outputs = self.prefill.step()
            self.decode.step()
        self.prefill.forget(number)
        return outputs[0].finish

    def serve(self, given: list[Ask]) -> list[Answer]:
        """Answers to requests that go one after the other, each by way of the prefill engine."""
        found = []
        for ask in given:
            assert self.send(ask.prompt, ask.salt) in (FinishReason.LENGTH, None)
            found += serve(self.decode, [replace(ask, step=0)])
        return found

    @property
    def arrived_tokens(self) -> int:
        assert self.decode.ledger.tiers is not None
        assert self.decode.ledger.tiers.arrivals is not None
        return self.decode.ledger.tiers.arrivals.loaded_tokens


def contract_of(spec: MemorySpec) -> Contract:
    return Contract(b"f" * 32, {kind: size for kind, size in unit_bytes(spec).items() if kind is not Kind.TAIL})


@contextmanager
def engine_pair(make, spec: MemorySpec, **settings: object) -> Iterator[EnginePair]:
    """`make` returns a runner with this much memory and this many seats."""
    config = EngineConfig(memory_bytes=16 << 20, **(SETTINGS | settings))
    prefilling = replace(config, departures_bytes=area_bytes(spec, 2), max_tokens_per_step=128)
    decoding = replace(config, arrivals_bytes=2 * area_bytes(spec, 8))
    sender, receiver = make(prefilling), make(decoding)
    sender.tiers.add_host_memory(prefilling.departures_bytes)
    receiver.tiers.add_host_memory(decoding.arrivals_bytes)
    listener = socket.create_server(("127.0.0.1", 0))
    door, contract = TransferDoor(listener), contract_of(spec)
    there = TcpTransport(contract, SECRET, Memories(arrived=receiver.tiers.area_units), door)
    here = TcpTransport(contract, SECRET, Memories(staged=sender.tiers.area_units))
    place = Destination("127.0.0.1", listener.getsockname()[1])
    prefill = Engine(spec, sender, prefilling, transport=here)
    assert prefill.ledger.departures is not None
    # Layer by layer: those of real models are larger.
    prefill.ledger.departures.sections = sections(spec, 1)
    try:
        yield EnginePair(prefill, Engine(spec, receiver, decoding, transport=there), place)
    finally:
        here.close()
        there.close()


def plain_pair(family: str, **settings: object):
    spec = spec_of(family)

    def make(config: EngineConfig) -> Runner:
        return Runner(model_of(family), spec, config.memory_bytes, config.max_sequences, threads=1)

    return engine_pair(make, spec, **settings)
