"""Measure what the host does between a landing and the masks of the next step, without a device.

    python -m benchmarks.mask_gap
    python -m benchmarks.mask_gap --vocabulary 248320

All rows answer JSON of a schema, whose strings have a bounded length or any. At depth 1 a step is launched before the
tokens before it are known, and its sampling follows when they have landed: they advance the grammars, and the next
masks are found. Meanwhile the device computes the forward pass. So it waits only as long as `gap`, from a landing to
the masks, exceeds that. The device is a fake that returns at once, and chooses among the allowed tokens by chance.
Without drafts, processor time, of one core. A larger vocabulary than that of the model in the box has pairs of its
words besides. `benchmarks.mask_rates` measures the same on a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from itertools import islice, product

import numpy as np

from benchmarks.draft_texts import PERSON
from benchmarks.planner import SPEC, prompt
from weft import builtin
from weft.base.config import EngineConfig
from weft.base.grammar import Grammar
from weft.base.plan import Ints, Landing, Plan
from weft.base.sampling import SamplingParams
from weft.engine.device import Capabilities, Device
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.text.grammar import Grammars
from weft.text.tokenizer import Tokenizer, load_tokenizer

ROWS = (1, 8, 32, 128)
STEPS = 200


def people(bounded: bool) -> Grammar:
    """Return JSON of persons. Masks of strings of a bounded length take longer than those of any string."""
    person = json.loads(json.dumps(PERSON))
    for each in person["properties"].values():
        if not bounded:
            each.pop("maxLength", None)
    return Grammar("json_schema", json.dumps({"type": "array", "items": person, "minItems": 64}))


PEOPLE, ANY_PEOPLE = people(bounded=True), people(bounded=False)


class WideTokenizer(Tokenizer):
    """The tokenizer of the model in the box, with pairs of its words as further tokens up to a number of tokens."""

    def __init__(self, narrow: Tokenizer, tokens: int) -> None:
        super().__init__(narrow.backend, narrow.specials, narrow.end_tokens)
        self.words = [narrow.bytes_of(token) for token in range(narrow.size)]
        known = set(self.words)
        # The first words are single bytes and control tokens.
        pairs = (first + second for first, second in product(self.words[1024:], self.words[1024:4096]))
        more = max(0, tokens - len(known))
        self.words += islice(dict.fromkeys(islice((pair for pair in pairs if pair not in known), 2 * more)), more)

    @property
    def size(self) -> int:
        return len(self.words)

    def bytes_of(self, token: int) -> bytes:
        return self.words[token]


def wide_grammars(tokens: int) -> Grammars:
    """Return grammars over this many tokens; 0: those of the model in the box."""
    narrow = load_tokenizer(builtin.FOLDER)
    assert narrow is not None
    tokenizer = WideTokenizer(narrow, tokens)
    return Grammars(tokenizer, tokens or tokenizer.size)


@dataclass(slots=True)
class Flight:
    plan: Plan
    late: Ints | tuple[()] = ()


class MaskedDevice(Device):
    """Computes nothing. Notes when it lands, and when it has the masks of the next step."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(1)
        self.landed_at = 0.0
        self.gaps: list[float] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(self.supply_masks)

    def launch(self, plan: Plan) -> Flight:
        return Flight(plan)

    def supply_masks(self, flight: Flight, masks: Ints) -> None:
        self.gaps.append(time.thread_time() - self.landed_at)
        flight.late = masks

    def land(self, flight: Flight) -> Landing:
        sampling = flight.plan.sampling
        tokens = np.zeros(flight.plan.sample_count, np.int32)
        for rows, masks in ((sampling.mask_row, sampling.mask_bits), (sampling.awaiting_mask, flight.late)):
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mask_gap", description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=0, help="tokens; default: those of the model in the box")
    grammars = wide_grammars(parser.parse_args().vocabulary)
    print(f"{'rows':>6} {'bounded':>9} {'any':>9}   strings; median microseconds; vocabulary {grammars._vocab_size}")
    for rows in ROWS:
        gaps = (time_masks(rows, grammars, grammar) * 1e6 for grammar in (PEOPLE, ANY_PEOPLE))
        print(f"{rows:>6}", *(f"{gap:>9.0f}" for gap in gaps), flush=True)


if __name__ == "__main__":
    main()
