"""What a simulated and a real engine with tiers miss, turn by turn."""

from __future__ import annotations

from weft.base.config import EngineConfig
from weft.base.grid import CELL, floor_to_grid
from weft.memory.audit import audit
from weft.simulate.costs import cost_model
from weft.simulate.engine import SimulatedEngine
from weft.simulate.sessions import SimulatedSession
from weft.simulate.stepping import Simulated
from weft.simulate.text import Text, simulated_request
from weft.simulate.workloads import PER_SESSION


def missed_by_turn(conversations: int, memory: int, host: int, turns: int = 6) -> list[int]:
    """Return how many conversations of each turn did not resume at the end of their last answer, nor load it.

    All of them are asked at once, then all again. Host memory has room for their last points twice, the device for a
    part of them.
    """
    config = EngineConfig(memory_bytes=memory, host_bytes=host, max_sequences=32, max_length=8192)
    engine = SimulatedEngine(cost_model("nemotron-nano-9b-v2"), config)
    texts = [Text(CELL, [(PER_SESSION * each, 600)]) for each in range(conversations)]
    missed, number = [], 0
    for turn in range(turns):
        asked: list[tuple[Simulated, int]] = []
        for each, text in enumerate(texts):
            before = text.length
            text.append(PER_SESSION * each + 2 * turn + 1, 150)
            request = simulated_request(text, PER_SESSION * each + 2 * turn + 2, 70)
            sequence = Simulated(number, request, SimulatedSession(0.0, iter(())), engine.now)
            engine.accept(sequence)
            # The last token of an answer was not computed.
            asked.append((sequence, floor_to_grid(before - 1, CELL)))
            number += 1
        while not engine.idle:
            engine.step(None)
        missed.append(sum(each.miss.cached < last for each, last in asked if each.miss is not None))
    audit(engine.ledger)
    return missed


def check_turns(conversations: int = 24, memory: int = 3 << 30, host: int = 7 << 30) -> None:
    """A point that the next turn went past is worth little, and so is one that only stood in for another."""
    missed = missed_by_turn(conversations, memory, host)
    assert sum(missed[3:]) <= conversations // 4
