"""Measure drafts from texts and grammars: edits, JSON and prose, with drafts and without in turns.

    python -m benchmarks.draft_texts weft-small --device cpu --dtype float32
    python -m benchmarks.draft_texts --device cpu --dtype float32 --only JSON
    python -m benchmarks.draft_texts qwen3.5-9b --rows 1 8

"edit" repeats a text with a few words changed, and "file" a text of 640 random tokens of which one in 80 is changed,
removed or new. Their answers are scripts, because the models cannot repeat a text: the tokens are replaced when a step
lands. So that the device need not know them, steps with drafts wait for the landing of the one before. "JSON" answers
by a schema, and "prose" are stories, greedy ones and sampled ones; only weft-small has a tokenizer and answers them.

Every round has new engines on the same device, which have learned nothing yet. The first round records steps and is
shown apart. The others are medians. Besides their seconds, the seconds of processor time are shown on a CPU: other
programs disturb them less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.gpu import Attempts, arguments_of, keep, machine, run, start, warm_up, without_flashinfer
from weft import LLM
from weft.base.grammar import Grammar
from weft.base.plan import Landing
from weft.base.sampling import SamplingParams
from weft.engine.assembly import PlannedStep
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.runner.cuda import recorded

MODELS = ("weft-small",)
BATCHES = (1,)
PARTS = ("file", "edit", "JSON", "greedy prose", "sampled prose")
ROUNDS, QUICK_ROUNDS = 6, 3
DRAFTS = ("off", "suffix")
TEXT = """The shop opens at nine in the morning. Bread is two coins, a cake is five coins, and tea is one coin.
On Sunday the shop is closed. Children get an apple for free. The owner is called Martha, and her dog is called Rex.
The shop stands beside the river, next to the old mill. In winter it opens one hour later.
"""
EDITED = TEXT.replace("cake", "pie").replace("Sunday", "Monday").replace("Martha", "Mary")
FILE, CHANGED_EVERY = 640, 80
STORY = 192
STORIES = ("Once upon a time", "The little boat", "A dog and a cat", "In the old house by the sea")
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "age_in_years": {"type": "integer", "minimum": 1, "maximum": 99},
        "favourite_animal": {"enum": ["dog", "cat", "horse", "bird"]},
        "lives_in_a_house": {"type": "boolean"},
        "home_town": {"type": "string", "maxLength": 12},
    },
    "required": ["first_name", "age_in_years", "favourite_animal", "lives_in_a_house", "home_town"],
    "additionalProperties": False,
}
QUESTIONS = ("Tell me about Tom.\n", "Who lives by the sea?\n", "A girl and her dog:\n", "The baker:\n")


def main() -> int:
    arguments = arguments_of("draft_texts", __doc__, limit_seconds=300, models=MODELS, rows=BATCHES, parts=PARTS)
    return run(arguments, measure, show)


@dataclass(frozen=True, slots=True)
class Work:
    """Requests that are answered one after the other, or `rows` of them at once. With a `script`, that is the answer.

    `tokens` bounds an answer; one with a grammar ends earlier.
    """

    prompts: list[np.ndarray]
    tokens: int
    script: Sequence[int] = ()
    temperature: float = 0.0
    grammar: Grammar | None = None
    rows: int = 1


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


def measure(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    attempts = Attempts()
    found: dict[str, Any] = {"machine": machine(arguments.device), "errors": attempts.errors, "works": {}}
    # Prompts take a small part of the time.
    recorded.PROMPT_TOKENS = recorded.PROMPT_TOKENS[:1]
    with opened(model, arguments) as llm:
        works = all_works(llm, arguments.rows)
        rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
        for name, work in works.items():
            if name.split(",")[0] not in arguments.only:
                continue
            with attempts.part(name):
                found["works"][name] = compare(llm, work, rounds)
                print(line_of(name, found["works"][name]), flush=True)
            keep(found, arguments)
    return found


def opened(model: str, arguments: argparse.Namespace) -> LLM:
    if model == "weft-small":
        memory = "512MiB" if arguments.memory == "auto" else arguments.memory
        return LLM(progress=False, device=arguments.device, dtype=arguments.dtype, memory=memory, draft="suffix")
    with without_flashinfer():
        llm = start(model, arguments, draft="suffix", max_sequences=max(arguments.rows), max_length=4096)
    warm_up(llm)
    return llm


def all_works(llm: LLM, batches: Sequence[int]) -> dict[str, Work]:
    text, edited = edited_file(llm.vocab_size)
    works = {f"file, {rows} rows": Work([text] * rows, len(edited), edited.tolist(), rows=rows) for rows in batches}
    if llm.tokenizer is None:
        return works

    def encoded(texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(llm.tokenizer.encode(each), np.int32) for each in texts]

    script = [int(token) for token in llm.tokenizer.encode(EDITED)]
    works["edit"] = Work(encoded([f"{TEXT}\nThe text with some changes:\n"]), len(script), script)
    works["JSON"] = Work(encoded(QUESTIONS), STORY, grammar=Grammar("json_schema", json.dumps(PERSON)))
    works["greedy prose"] = Work(encoded(STORIES), STORY)
    works["sampled prose"] = Work(encoded(STORIES), STORY, temperature=0.8)
    return works


def edited_file(vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a text of random tokens, and the text in which some of them are changed, removed or new, in turns."""
    random = np.random.default_rng(1)
    text = random.integers(vocabulary // 8, vocabulary // 2, FILE).astype(np.int32)
    edited: list[int] = []
    for place, token in enumerate(text.tolist()):
        change = place // CHANGED_EVERY % 3 if place % CHANGED_EVERY == CHANGED_EVERY // 2 else None
        new = [int(random.integers(vocabulary // 8, vocabulary // 2))] if change in (0, 2) else []
        edited += new if change in (0, 1) else [*new, token]
    return text, np.array(edited, np.int32)


def compare(llm: LLM, work: Work, rounds: int) -> dict[str, Any]:
    """Return the figures of each way: of the first round, and medians of the others."""
    found: dict[str, list[dict[str, float]]] = {draft: [] for draft in DRAFTS}
    for _ in range(rounds):
        for draft in DRAFTS:
            found[draft].append(answer(new_engine(llm, work, draft), work))
    return {
        draft: {name: statistics.median(each[name] for each in figures[1:]) for name in figures[0]}
        | {"first_seconds": figures[0]["seconds"]}
        for draft, figures in found.items()
    }


def new_engine(llm: LLM, work: Work, draft: str) -> CountingEngine:
    before = llm.engine
    config = replace(before.config, draft=draft)
    engine = CountingEngine(before.ledger.spec, before._device, config, before._constraints)
    engine.script = work.script
    if work.script:
        engine.planner.device_builds_on_flight = None
    return engine


def answer(engine: CountingEngine, work: Work) -> dict[str, float]:
    """Return tokens, steps, computed tokens and seconds, those of prompts not included."""
    tokens = steps = computed = 0
    seconds = processor = 0.0
    params = SamplingParams(max_tokens=work.tokens, temperature=work.temperature, seed=1, ignore_eos=True)
    for first in range(0, len(work.prompts), work.rows):
        for prompt in work.prompts[first : first + work.rows]:
            engine.add(Request(prompt, params, grammar=work.grammar))
        while len(engine.planner.queue) or engine.planner.prefilling:
            engine.step()
        before = engine.planner.number, engine.computed
        began, of_processor = time.perf_counter(), time.process_time()
        while not engine.idle:
            tokens += sum(output.token is not None for output in engine.step())
        seconds += time.perf_counter() - began
        processor += time.process_time() - of_processor
        steps, computed = steps + engine.planner.number - before[0], computed + engine.computed - before[1]
    return {"seconds": seconds, "processor": processor, "tokens": tokens, "steps": steps, "computed": computed}


def line_of(name: str, each: dict[str, Any]) -> str:
    off, on = (each[draft] for draft in DRAFTS)
    gains = (off[part] / on[part] for part in ("steps", "seconds", "processor", "first_seconds"))
    in_steps, seconds, processor, first = gains
    counts = f"{off['tokens']:.0f} tokens, steps {off['steps']:.0f} -> {on['steps']:.0f} (÷ {in_steps:.2f})"
    times = f"{off['tokens'] / off['seconds']:.1f} -> {on['tokens'] / on['seconds']:.1f} tokens/s"
    return f"  {name:<14} {counts}, {times}: {seconds:.2f}, processor {processor:.2f}, first round {first:.2f}"


def show(model: str, found: dict[str, Any]) -> None:
    print(f"  {found['machine']['device']}")
    for name, each in found["works"].items():
        print(line_of(name, each))
    for part, error in found["errors"].items():
        print(f"  {part}: {error}")


if __name__ == "__main__":
    sys.exit(main())
