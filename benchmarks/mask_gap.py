"""Measure what the host does between a landing and the masks of the next step, without a device.

    python -m benchmarks.mask_gap

All rows answer JSON of a schema. At depth 1 a step is launched before the tokens before it are known, and its sampling
follows when they have landed: they advance the grammars, and the next masks are found. Meanwhile the device computes
the forward pass. So it waits only as long as `gap`, from a landing to the masks, exceeds that. The device is a fake
that returns at once, and chooses among the allowed tokens by chance. Without drafts, processor time, of one core.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.draft_texts import PERSON
from benchmarks.planner import SPEC, prompt
from weft import builtin
from weft.base.config import EngineConfig
from weft.base.grammar import Grammar
from weft.base.plan import Ints, Landing, Plan
from weft.base.sampling import SamplingParams
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.text.grammar import Grammars
from weft.text.tokenizer import load_tokenizer

ROWS = (1, 8, 32, 128)
STEPS = 200


@dataclass(slots=True)
class Flight:
    plan: Plan
    late: Ints | tuple[()] = ()


class MaskedDevice:
    """Computes nothing. Notes when it lands, and when it has the masks of the next step."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(1)
        self.landed_at = 0.0
        self.gaps: list[float] = []

    def launch(self, plan: Plan) -> Flight:
        return Flight(plan)

    def supply_masks(self, flight: Flight, masks: Ints) -> None:
        self.gaps.append(time.thread_time() - self.landed_at)
        flight.late = masks

    def land(self, flight: Flight) -> Landing:
        sampling = flight.plan.sampling
        tokens = np.zeros(flight.plan.sample_count, np.int32)
        for rows, masks in ((sampling.mask_row, sampling.mask_bits), (sampling.late, flight.late)):
            for row, mask in zip(rows.tolist(), masks, strict=True):
                allowed = np.flatnonzero(np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little"))
                tokens[row] = self.random.choice(allowed)
        self.landed_at = time.thread_time()
        return Landing(tokens, None, None)


def time_masks(rows: int, grammars: Grammars, grammar: Grammar) -> float:
    """Return the median seconds from a landing to the masks of the step in flight."""
    device = MaskedDevice()
    config = EngineConfig(memory_bytes=1 << 30, max_sequences=rows, max_length=4096, depth=1, draft="off")
    engine = Engine(SPEC, device, config, grammars)
    random, params = np.random.default_rng(0), SamplingParams(max_tokens=1024, temperature=0)
    for number in range(STEPS):
        for _ in range(rows - engine.planner.running - len(engine.planner.queue)):
            engine.add(Request(prompt(random, 100), params, grammar=grammar))
        engine.step()
        if number == STEPS // 4:
            device.gaps.clear()
    return statistics.median(device.gaps)


def main() -> None:
    tokenizer = load_tokenizer(builtin.FOLDER)
    assert tokenizer is not None
    grammars = Grammars(tokenizer, tokenizer.size)
    people = {"type": "array", "items": PERSON, "minItems": 64}
    grammar = Grammar("json_schema", json.dumps(people))
    print(f"{'rows':>6} {'gap':>9}   median microseconds; vocabulary {tokenizer.size}")
    for rows in ROWS:
        print(f"{rows:>6} {time_masks(rows, grammars, grammar) * 1e6:>9.0f}", flush=True)


if __name__ == "__main__":
    main()
