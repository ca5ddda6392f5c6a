"""Answers whose drafts reach beyond a stop token, and how those are counted."""

from __future__ import annotations

import numpy as np

from tests.support.drafting.scripted import ScriptedDrafting, Unfollowed
from tests.support.hashed.rolling import RollingDevice, oracle, rolling_spec
from weft.base.config import EngineConfig
from weft.base.sampling import SamplingParams
from weft.engine.events import FinishReason, Report
from weft.engine.loop import Engine
from weft.engine.request import Request

ANSWER = 24
ROOM = 6


class Certain(ScriptedDrafting):
    """Drafts the whole answer, as far as there is room, and beyond where it will stop."""

    def begin(self, prompt, salt, most, prediction, grammar=None):
        found = super().begin(prompt, salt, most, prediction, grammar)
        found.wrong = 0.0
        found.random.randint = lambda least, most: most
        return found


def answered(prompt: list[int], place: int, depth: int, kind: type[RollingDevice]) -> tuple[list[int], Report, Engine]:
    """Return the answer to a prompt that a stop token ends at this place, what was reported, and the engine."""
    spec = rolling_spec(cell=4, room=ROOM)
    whole = oracle(spec, prompt, ANSWER)
    config = EngineConfig(memory_bytes=1 << 16, max_sequences=2, max_length=64, depth=depth, paranoid=True)
    device = kind(spec, config.memory_bytes, 2, lazy=depth > 0)
    engine = Engine(spec, device, config, drafting=Certain({tuple(prompt): whole}, ROOM, 0))
    params = SamplingParams(max_tokens=ANSWER, temperature=0.0)
    number = engine.add(Request(np.array(prompt, np.int32), params, frozenset([whole[place]])))
    outputs = []
    while not engine.idle:
        outputs += engine.step()
    assert outputs[-1].finish is FinishReason.STOP
    return [output.token for output in outputs], engine.report(number), engine


def check(place: int, depth: int, kind: type[RollingDevice]) -> None:
    prompt = [place + 1, 5, 2]
    whole = oracle(rolling_spec(cell=4, room=ROOM), prompt, ANSWER)
    tokens, report, engine = answered(prompt, place, depth, kind)
    assert tokens == whole[: whole.index(whole[place]) + 1]
    # The first token comes with the prompt; every row after it brings one more token than drafts were accepted.
    # A draft that is the stop token itself is right, and still not accepted: it is the token after the others.
    assert report.drafts.accepted == len(tokens) - 1 - report.drafts.rows
    assert len(engine.ledger.cache.trie) * 4 <= len(prompt) + len(tokens), "cells beyond the stop token are cached"


def check_counts() -> None:
    for place in range(1, 16):
        for depth in (0, 1):
            check(place, depth, Unfollowed)
