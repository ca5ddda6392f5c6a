"""Host memory below a GPU: what the device evicted is loaded beside the steps, and answers stay the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest

from tests.support.models.cuda_engines import SETTINGS, for_each, make, tiny
from tests.support.models.engines import Answer, Ask, serve, smallest_memory, tokens
from weft.base.config import EngineConfig
from weft.base.sampling import SamplingParams
from weft.base.transfers import Destination, Granted, Offer, SendingEnded, StagedUnit, TransferEvent, UnitsSent
from weft.device.host_memory import HostMemory
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.sections import sections
from weft.memory.spec import MemorySpec
from weft.memory.tiers.copies import TiersBelow
from weft.memory.tiers.exchange.sent_units import piece_of
from weft.runner.cuda.marking import marker_of

pytestmark = pytest.mark.gpu

HOST_BYTES = 256 << 20
TOLERANCE = 2e-3


@pytest.mark.parametrize("paranoid", [True, False])
@pytest.mark.parametrize("family", for_each(("falcon_h1", "qwen3_next", "lfm2", "gemma3", "llama"), "tiny {} float32"))
def test_a_prefix_that_the_gpu_evicted_is_answered_from_host_memory(family: str, paranoid: bool) -> None:
    llm = tiny(family, "float32")
    runner, spec = llm.engine._device, llm.engine.ledger.spec
    if not runner.tiers.levels:
        runner.tiers.add_host_memory(HOST_BYTES)
    rows = SETTINGS["max_sequences"]
    memory = smallest_memory(family, 420, rows, spec)
    prompts = [tokens(300 + 10 * seed, seed) for seed in range(6)]
    alone = [serve(make(llm, cache=False), [Ask(prompt)])[0] for prompt in prompts]
    engine = make(llm, memory, host_bytes=HOST_BYTES, paranoid=paranoid, max_length=420)
    first = [serve(engine, [Ask(prompt)])[0] for prompt in prompts]
    again = [serve(engine, [Ask(prompt)])[0] for prompt in prompts]
    together = serve(engine, [Ask(prompt, step=number) for number, prompt in enumerate(prompts)])
    for answers in (first, again, together):
        for answer, expected in zip(answers, alone, strict=True):
            assert_alike(answer, expected)
    assert sum(a.report.loaded_tokens for a in again) > 256


def assert_alike(answer: Answer, expected: Answer) -> None:
    """The same tokens with about the same log-probabilities, up to a token that two are about equally likely for."""
    assert len(answer.tokens) == len(expected.tokens)
    for token, other, a, b in zip(answer.tokens, expected.tokens, answer.logprobs, expected.logprobs, strict=True):
        assert abs(a - b) < TOLERANCE
        if token != other:
            return


class KeepingEnd:
    """A transport that grants everything, and keeps the bytes of what it is given to send."""

    send_bytes_per_second: float | None = None
    send_seconds = 0.0

    def __init__(self, spec: MemorySpec, units: Callable[[str, int], memoryview]) -> None:
        self.sizes, self.units = unit_bytes(spec), units
        self.wake: Callable[[], None] = lambda: None
        self.events: list[TransferEvent] = []
        self.kept: dict[tuple[str, int], bytes] = {}
        self.pieces = 0

    def open(self, transfer: int, destination: Destination, offer: Offer) -> None:
        self.events.append(Granted(transfer, 0, len(offer.keys), point=True))

    def send(self, transfer: int, units: Sequence[StagedUnit]) -> None:
        for unit in units:
            start, end = piece_of(unit, self.sizes)
            place = (unit.kind, unit.place)
            assert len(self.kept.get(place, b"")) == start
            self.kept[place] = self.kept.get(place, b"") + bytes(self.units(unit.kind, unit.unit)[start:end])
            self.pieces += 1
        self.events.append(UnitsSent(transfer, tuple(units)))

    def finish(self, transfer: int) -> None:
        self.events.append(SendingEnded(transfer, None))

    def abandon(self, transfer: int) -> None:
        raise AssertionError("nothing is aborted")

    def poll(self) -> list[TransferEvent]:
        events, self.events = self.events, []
        return events

    def wait(self, seconds: float) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("family", for_each(("falcon_h1", "qwen3_next", "lfm2", "gemma3"), "tiny {} float32"))
def test_what_leaves_layer_by_layer_is_what_the_step_has_written(family: str) -> None:
    llm = tiny(family, "float32")
    runner, before = llm.engine._device, llm.engine
    spec, size = before.ledger.spec, 16 << 20
    config = EngineConfig(**SETTINGS, memory_bytes=before.config.memory_bytes, departures_bytes=size)
    tiers, runner.tiers = runner.tiers, TiersBelow(spec, runner.store, partial(HostMemory, runner.store))
    runner.tiers.add_host_memory(size)
    runner.marker = marker_of(runner.model, "cuda")
    try:
        end = KeepingEnd(spec, runner.tiers.area_units)
        engine = Engine(spec, runner, config, transport=end)
        assert engine.ledger.departures is not None
        engine.ledger.departures.sections = sections(spec, 1)
        for length in (512, 448):
            end.kept.clear()
            prompt = np.array(tokens(length, length), np.int32)
            number = engine.add(Request(prompt, SamplingParams(max_tokens=0), send_to=Destination("there", 1)))
            keys = list(engine._sequences[number].keys)
            while not engine.idle:
                engine.step()
            nodes = [engine.ledger.cache.trie.nodes[key] for key in keys]
            pages = {("page", cell): node.page for cell, node in enumerate(nodes) if node.page is not None}
            point = nodes[-1].resume
            assert point is not None
            expected = {place: runner.store.unit(Kind.PAGE, page) for place, page in pages.items()}
            if point.slot is not None:
                expected["state", len(keys)] = runner.store.unit(Kind.STATE, point.slot)
            for place, unit in expected.items():
                assert end.kept[place] == unit.cpu().numpy().tobytes(), place
        assert end.pieces > len(end.kept)
    finally:
        runner.tiers, runner.marker = tiers, None
