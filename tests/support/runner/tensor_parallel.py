"""Answers of a grammar from a group of ranks."""

from __future__ import annotations

import numpy as np

from tests.support.engine.late_masks import HashedConstraint
from tests.support.models.engines import tokens
from weft.base.sampling import SamplingParams
from weft.engine.loop import Engine
from weft.engine.request import Request


def constrained_answers(engine: Engine) -> list[list[int]]:
    """The answers of two constrained rows and a free one, at the depth of an engine."""
    vocabulary, found = 90, {}
    for number in range(3):
        constraint = HashedConstraint(number, vocabulary) if number < 2 else None
        request = Request(np.array(tokens(9, number), np.int32), SamplingParams(max_tokens=12, temperature=0))
        found[engine.add(request, constraint)] = []
    while not engine.idle:
        for output in engine.step():
            found[output.sequence].append(output.token)
    return list(found.values())
