"""Measure verification of drafts with scripted acceptance on a GPU, and suffix drafts with weft-small on a CPU.

    python -m benchmarks.drafts                          Nemotron-Nano-9B-v2 and Qwen3.5-9B, 3 drafts a row
    python -m benchmarks.drafts qwen3.5-35b-a3b --quick
    python -m benchmarks.drafts weft-small --device cpu --dtype float32

With random weights, no draft would be right. So acceptance is scripted, as in published benchmarks: drafts are any
tokens, and each is accepted with a fixed probability if those before it were, whatever the model says. With 0.81, three
drafts give 3.0 tokens a step on average, the free one included. The time of a step is that of real drafts; the drafter
costs nothing. Three ways are compared: no drafts, 3 drafts in every row, and up to 7 drafts chosen by the engine, whose
acceptance falls from 0.7 to 0.1. The last line of a size has drafts that are never accepted, chosen by the engine.

With weft-small, drafts are the suffixes of real texts, in an engine that has learned nothing yet. "edit" repeats the
prompt with a few words changed; the answer is a script, because the model is too small to repeat a text. "prose" are
stories, greedy ones and sampled ones. The figures that count are steps and computed tokens: the time of a step with
several tokens depends on the processor.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from benchmarks.gpu import Ask, Attempts, arguments_of, fresh, keep, machine, random_prompt, run, start, warm_up
from weft import LLM, SamplingParams
from weft.base.plan import Landing
from weft.engine.assembly import PlannedStep
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.speculate.costs import FreeDrafts
from weft.speculate.drafting import Acceptance, Drafting, Proposal, SequenceDrafts
from weft.speculate.suffix import SharedTexts

MODELS = ("nemotron-nano-9b-v2", "qwen3.5-9b")
BATCHES = (1, 8, 32, 128)
PROMPT = 128
ANSWER = 192
STEADY = (0.81,) * 3
FALLING = (0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
NEVER = (0.0,) * 7

TEXT = """The shop opens at nine in the morning. Bread is two coins, a cake is five coins, and tea is one coin.
On Sunday the shop is closed. Children get an apple for free. The owner is called Martha, and her dog is called Rex.
The shop stands beside the river, next to the old mill. In winter it opens one hour later.
"""
EDITED = TEXT.replace("cake", "pie").replace("Sunday", "Monday").replace("Martha", "Mary")
STORY = 192
STORIES = ("Once upon a time", "The little boat", "A dog and a cat", "In the old house by the sea")


def main() -> int:
    return run(arguments_of("drafts", __doc__, limit_seconds=420, models=MODELS), measure, show)


def measure(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    attempts = Attempts()
    found: dict[str, Any] = {"machine": machine(arguments.device), "errors": attempts.errors}
    if model == "weft-small":
        with attempts.part("texts"):
            found["texts"] = measure_texts(arguments)
        return found
    batches = [rows for rows in BATCHES if rows <= (8 if arguments.quick else 128)]
    llm = start(model, arguments, draft="suffix", max_sequences=max(batches), max_length=1024)
    warm_up(llm)
    found["rows"] = []
    for rows in batches:
        with attempts.part(f"{rows} rows"):
            found["rows"].append({"rows": rows} | measure_rows(llm, rows))
        keep(found, arguments)
    return found


# scripted acceptance --------------------------------------------------------------------------------------------------


class ScriptedDrafts(SequenceDrafts):
    """Any tokens, as many as there are chances. The engine learns their acceptance, from that of a grammar on."""

    def __init__(
        self, prompt: np.ndarray, chances: Sequence[float], overall: dict[str, Acceptance], fixed: bool
    ) -> None:
        super().__init__(prompt, b"", len(chances), suffixes=False, overall=overall)
        self.chances = chances
        self.fixed = fixed

    def pause(self) -> int:
        return 0 if self.fixed else super().pause()

    def propose(self, answer: list[int], most: int, shared: SharedTexts) -> Proposal | None:
        count = min(most, len(self.chances))
        if count < 1:
            return None
        return self.spell(range(1000, 1000 + count), most)


class ScriptedDrafting(Drafting):
    """`fixed`: every row has all its drafts in every step; otherwise learned costs decide."""

    def __init__(self, chances: Sequence[float], fixed: bool) -> None:
        super().__init__(len(chances), suffixes=False, costs=FreeDrafts() if fixed else None)
        self.chances = chances
        self.fixed = fixed

    def begin(self, prompt: Any, salt: bytes, most: int | None, prediction: Any) -> SequenceDrafts:
        return ScriptedDrafts(prompt, self.chances, self.overall, self.fixed)

    def choose(self, proposals: Sequence[Proposal], rows: int, most: int) -> list[int]:
        return [len(p.tokens) for p in proposals] if self.fixed else super().choose(proposals, rows, most)


class ScriptedEngine(Engine):
    """Accepts drafts by chance, whatever the model says."""

    random = Random(1)

    def verify(self, step: PlannedStep, landing: Landing) -> dict[int, int]:
        verified = {}
        for row, proposal in step.drafts.items():
            drafts = step.sequences[row].drafting
            assert isinstance(drafts, ScriptedDrafts)
            chances = drafts.chances[: len(proposal.tokens)]
            wrong = (place for place, chance in enumerate(chances) if self.random.random() >= chance)
            verified[row] = next(wrong, len(chances))
        return verified


def measure_rows(llm: LLM, rows: int) -> dict[str, Any]:
    """Return tokens per second of `rows` rows: without drafts, with three, with adaptive ones, with useless ones."""
    plain = tokens_per_second(fresh(llm, draft="off"), llm, rows)
    found: dict[str, Any] = {"plain": plain}
    for name, chances, fixed in (("three", STEADY, True), ("falling", FALLING, False), ("never", NEVER, False)):
        before = llm.engine
        drafting = ScriptedDrafting(chances, fixed)
        engine = ScriptedEngine(before.ledger.spec, before._device, before.config, drafting=drafting)
        found[name] = tokens_per_second(engine, llm, rows)
        counts = drafting.counts
        verified = max(1, counts.proposed["grammar", 1])
        found[f"{name} accepted"] = 1 + counts.accepted.total() / verified
    return found


def tokens_per_second(engine: Engine, llm: LLM, rows: int) -> float:
    """Return the rate from the first decode on. The first answers warm up what the cost model learns from."""
    for round_ in range(2):
        for number in range(rows):
            engine.add(Ask(random_prompt(llm, PROMPT, rows, number, round_), ANSWER).request())
        while len(engine.planner.queue) or engine.planner.prefilling:
            engine.step()
        began, tokens = time.perf_counter(), 0
        while not engine.idle:
            tokens += sum(output.token is not None for output in engine.step())
        seconds = time.perf_counter() - began
    return tokens / seconds


# real answers ---------------------------------------------------------------------------------------------------------


class CountingEngine(Engine):
    """Counts computed tokens. With a `script`, every answer is that text, whatever the model says."""

    computed = 0
    script: Sequence[int] = ()

    def verify(self, step: PlannedStep, landing: Landing) -> dict[int, int]:
        self.computed += len(step.plan.tokens)
        if self.script:
            rows, _ = step.plan.samples
            known = np.array([len(step.sequences[row].generated) for row in rows.tolist()])
            place = known + np.arange(len(rows)) - np.searchsorted(rows, rows)
            landing.tokens[:] = np.array(self.script)[np.minimum(place, len(self.script) - 1)]
        return super().verify(step, landing)


def measure_texts(arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    options = {"device": arguments.device, "dtype": arguments.dtype, "memory": "512MiB", "draft": "suffix"}
    with LLM(progress=False, **options) as llm:
        script = [int(token) for token in llm.tokenizer.encode(EDITED)]
        parts = {"edit": (script, [f"{TEXT}\nThe text with some changes:\n"], 0.0)}
        parts |= {"greedy prose": ([], list(STORIES), 0.0), "sampled prose": ([], list(STORIES), 0.8)}
        for name, (script, texts, temperature) in parts.items():
            for draft in ("off", "suffix"):
                before = llm.engine
                engine = CountingEngine(before.ledger.spec, before._device, replace(before.config, draft=draft))
                engine.script = script
                tokens = len(script) or STORY
                params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=1, ignore_eos=True)
                prompts = [np.array(llm.tokenizer.encode(text), np.int32) for text in texts]
                found[f"{name} {draft}"] = answer_texts(engine, prompts, params)
    return found


def answer_texts(engine: CountingEngine, prompts: list[np.ndarray], params: SamplingParams) -> dict[str, float]:
    """Return tokens, steps, computed tokens and seconds of answers, one after the other."""
    began, tokens = time.perf_counter(), 0
    for prompt in prompts:
        engine.add(Request(prompt, params))
        while not engine.idle:
            tokens += sum(output.token is not None for output in engine.step())
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "tokens": tokens, "steps": engine.planner.number, "computed": engine.computed}


def show(model: str, found: dict[str, Any]) -> None:
    print(f"  {found['machine']['device']}")
    if "rows" in found:
        print(f"  {'rows':>6} {'plain':>9} {'3 drafts':>16} {'falling':>16} {'never':>16}   tokens/s (÷ plain, length)")
    for each in found.get("rows", ()):
        line = f"  {each['rows']:>6} {each['plain']:>9.0f}"
        for name in ("three", "falling", "never"):
            line += f" {each[name]:>7.0f} {each[name] / each['plain']:.2f} {each[f'{name} accepted']:.2f}"
        print(line)
    for name, each in found.get("texts", {}).items():
        rate = each["tokens"] / each["seconds"]
        counts = f"{each['tokens']} tokens in {each['steps']} steps, {each['computed']} computed"
        print(f"  {name:<20} {rate:>7.1f} tokens/s, {counts}")
    for part, error in found["errors"].items():
        print(f"  {part}: {error}")


if __name__ == "__main__":
    sys.exit(main())
