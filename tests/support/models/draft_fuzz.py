"""Random requests with every parameter that depends on the answer so far, answered with and without drafts.

The undrafted engine has room for everything. The drafted one has random settings: either depth, little memory, short
chunks, and any drafter. Drafts are made of the undrafted answers, of earlier text, or by a model or an MTP head.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.drafting.scripted import ScriptedDrafting
from tests.support.engine.sameness import admit_everything
from tests.support.models import tiny_model
from tests.support.models.draft_choices import MOST_ROUNDING, Choice, check_inputs, chosen, difference_of, tied, watch
from tests.support.models.engines import VOCABULARY, model_of, smallest_memory, spec_of, tokens
from tests.support.models.exact_traffic import exact_model
from tests.support.models.mtp_oracle import checkpoint
from tests.support.models.near_ties import Computed, NearTies
from tests.support.models.tiny_model import no_time
from weft.base.config import EngineConfig
from weft.base.grammar import Grammar
from weft.base.sampling import SamplingParams
from weft.drafting.head import DraftHead
from weft.drafting.model import DraftModel
from weft.drafting.policy.choosing import Drafting
from weft.drafting.policy.costs import FreeDrafts
from weft.drafting.state_lines import StateLines
from weft.engine.events import FinishReason, Output
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.kernels.choosing import choose
from weft.kernels.interface import Operations
from weft.memory.ledger import Ledger
from weft.memory.spec import MemorySpec
from weft.models.model import CausalModel
from weft.models.mtp import MtpHead
from weft.models.weights import load_head, load_model
from weft.runner.exact import ExactCells
from weft.runner.hidden_states import HiddenStates
from weft.runner.passes import HeadPass, KeepingPass
from weft.runner.runner import Runner
from weft.text.grammar import Grammars

ROOM = 5
SEATS = 16
MEMORY = 32 << 20
LONGEST = 344
ASKED = 20  # requests of a round
# Requests and seats of the rounds of many requests: steps of more rows take little longer, and have more company.
WIDE_ASKED, WIDE_SEATS = 60, 48
WIDEST = "greatest difference of logits, 1e-9"
DRAFTERS = ("scripted", "suffix", "prediction", "model")
WITH_HEAD = ("qwen3_5", "qwen3_next", "nemotron_h")
GRAMMARS = (
    Grammar("regex", "(abcabcabc|abcabd)+x[0-9]{3}"),
    Grammar("choice", json.dumps(["yes, of course", "yes, but later", "no"])),
)


@dataclass(frozen=True)
class Subject:
    """A model under test, and its head if that drafts."""

    model: CausalModel
    memories: MemorySpec
    operations: Operations | None = None
    head: MtpHead | None = None


@lru_cache(maxsize=8)
def subject(family: str, exact: bool, head: bool) -> Subject:
    if not head:
        if not exact:
            return Subject(model_of(family), spec_of(family))
        found = exact_model(family, torch.float32)
        return Subject(found.model, found.spec, found.chosen.operations)
    folder = checkpoint(family).folder
    model, _ = load_model(folder, torch.float32, progress=False, exact=exact)
    operations = choose("cpu", torch.float32, model.memories, exact=exact).operations
    loaded = load_head(folder, model, torch.float32, "checkpoint", 0, operations)
    return Subject(model, MemorySpec(model.memories(operations)), operations, loaded)


@cache
def grammars() -> Grammars:
    return Grammars(tiny_model.tokenizer(), VOCABULARY, no_time)


@cache
def tight(family: str, exact: bool, head: bool, length: int, seats: int) -> int:
    spec = replace(subject(family, exact, head).memories, draft_room=ROOM)
    return smallest_memory(family, length, seats, spec)


@dataclass(frozen=True)
class Wish:
    """A request. `ends_at` are tokens at which the caller ends the answer, as it does at a stop string."""

    prompt: list[int]
    params: SamplingParams
    step: int = 0
    abort_after: int | None = None
    salt: bytes = b""
    grammar: Grammar | None = None
    ends_at: frozenset[int] = frozenset()

    def request(self, guess: list[int] | None) -> Request:
        return Request(
            np.array(self.prompt, np.int32),
            self.params,
            frozenset(self.params.stop_token_ids),
            self.salt,
            grammar=self.grammar,
            prediction=None if guess is None else np.array(guess, np.int32),
        )


@dataclass
class Told:
    """An answer: its outputs up to where it ended, and what was reported with it."""

    outputs: list[Output] = field(default_factory=list)
    finish: FinishReason | None = None
    scores: list[float] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [output.token for output in self.outputs]


def wishes(random: Random, exact: bool, count: int = ASKED) -> list[Wish]:
    long = random.random() < 0.1
    return [wish(random, number, exact, long) for number in range(count)]


def wish(random: Random, number: int, exact: bool, long: bool) -> Wish:
    def some(share: float, value: Any) -> dict[str, Any]:
        name, given = value
        return {name: given} if random.random() < share else {}

    grammar = random.choice(GRAMMARS) if random.random() < 0.2 else None

    def several(count: int) -> tuple[int, ...]:
        # A grammar needs its letters.
        return tuple(random.sample(range(3 if grammar is None else 128, VOCABULARY), count))

    count, greedy = random.choice([1, 9, 20, 40]), random.random() < 0.5
    # A text that repeats itself has suffixes.
    prompt = tokens(random.choice([1, 9, 40, 62, 150]), random.randrange(1 << 30)) * random.choice([1, 1, 2])
    if long:
        # Sequences outgrow the memory together.
        prompt, count = prompt[:40], 120
    chosen = some(0.2, ("repetition_penalty", random.choice([0.8, 1.3])))
    chosen |= some(0.2, ("frequency_penalty", random.choice([-0.5, 1.5]))) | some(0.2, ("presence_penalty", 1.0))
    chosen |= some(0.2, ("logit_bias", {token: random.choice([-100.0, 3.0]) for token in several(4)}))
    chosen |= some(0.3, ("stop_token_ids", several(12))) | some(0.3, ("min_tokens", min(count, random.choice([3, 9]))))
    chosen |= some(0.2, ("draft", random.choice([0, 2]))) | some(0.2, ("prompt_logprobs", random.choice([0, 2])))
    if not greedy:
        chosen |= some(0.3, ("top_k", 20)) | some(0.3, ("top_p", 0.9)) | some(0.2, ("min_p", 0.02))
    if grammar is None:
        chosen |= some(0.2, ("bad_words", tuple(several(random.choice([1, 2])) for _ in range(30))))
        chosen |= some(0.1, ("allowed_token_ids", several(60)))
        if "min_tokens" in chosen:
            # Half of the tokens that may come are stop tokens: the answer ends as soon as it may, or shortly after.
            likely = several(24)
            chosen |= {"allowed_token_ids": likely, "stop_token_ids": likely[:12]}
    params = SamplingParams(
        max_tokens=count, temperature=0.0 if greedy else 1.0, seed=number, logprobs=2, logits_digest=exact, **chosen
    )
    return Wish(
        prompt,
        params,
        step=random.choice([0, 0, 1, 5, 20]),
        abort_after=random.randint(1, 30) if random.random() < 0.15 else None,
        salt=random.choice([b"", b"", b"tenant"]),
        grammar=grammar,
        ends_at=frozenset(several(12)) if random.random() < 0.2 else frozenset(),
    )


class WatchedEngine(Engine):
    """An engine that keeps what its tokens were chosen from."""

    def __init__(self, spec: MemorySpec, runner: Runner, *others: Any, **more: Any) -> None:
        super().__init__(spec, runner, *others, **more)
        self.choices = watch(self)


def engine_of(
    found: Subject, exact: bool, memory: int, drafting: Drafting | None = None, seats: int = SEATS, **settings: Any
) -> WatchedEngine:
    """An engine with room for drafts in its tails, also if it has none: where a ring begins again, sums are split."""
    options = {"max_sequences": seats, "max_tokens_per_step": 512, "max_length": LONGEST, "paranoid": True}
    config = EngineConfig(memory_bytes=memory, exact=exact, **(options | settings))
    spec = replace(found.memories, draft_room=ROOM)
    hidden = None
    if drafting is not None and drafting.model == DraftHead.name:
        hidden = HiddenStates(StateLines(seats, 1000 * seats // SEATS), found.head.width, torch.float32)
    runner = Runner(
        found.model,
        spec,
        memory,
        seats,
        threads=1,
        operations=found.operations,
        computes=None if hidden is None else KeepingPass(hidden),
        numerics=ExactCells(getattr(found.operations, "decodes_at_once", 1)) if exact else None,
    )
    return WatchedEngine(spec, runner, config, drafting=drafting, draft_model=drafter(found, drafting, hidden, seats))


def drafter(found: Subject, drafting: Drafting | None, hidden: HiddenStates | None, seats: int) -> DraftModel | None:
    if drafting is None or drafting.model is None:
        return None
    if drafting.model == DraftModel.name:
        other = replace(spec_of(drafting.family), draft_room=ROOM)
        own = Ledger(other, MEMORY, seats, LONGEST, remember_freed=True)
        small = Runner(model_of(drafting.family), other, MEMORY, seats, "cpu", 1)
        return DraftModel(own, small, VOCABULARY, 96, paranoid=True)
    spec = MemorySpec(found.head.memories(found.operations), draft_room=ROOM)
    assert hidden is not None
    own = Ledger(spec, MEMORY, seats, LONGEST, remember_freed=True)
    head = Runner(found.head, spec, MEMORY, seats, "cpu", 1, found.operations, computes=HeadPass(hidden))
    return DraftHead(hidden.rows, own, head, VOCABULARY, 96, True)


def drafting_of(kind: str, random: Random, asked: list[Wish], answers: list[Told]) -> Drafting:
    if kind == "scripted":
        known = {tuple(each.prompt): answer.tokens for each, answer in zip(asked, answers, strict=True)}
        return ScriptedDrafting(known, ROOM, random.randrange(1 << 30))
    if kind in (DraftModel.name, DraftHead.name):
        found = Drafting(ROOM, costs=FreeDrafts(), suffixes=random.random() < 0.5, model=kind)
        found.family = random.choice(["qwen3_5", "gemma3", "llama"])
        return found
    found = Drafting(ROOM, costs=FreeDrafts())
    follows = Random(random.random())
    found.plans_ahead = lambda known, unknown, lost: follows.random() < 0.8
    for each, answer in zip(asked, answers, strict=True):
        # The same tenant asked before, and got a part of the answer.
        found.ended(each.salt, np.array(each.prompt + answer.tokens[: random.randint(0, 40)], np.int32))
    return found


def answer_all(engine: WatchedEngine, asked: list[Wish], guesses: list[list[int]] | None = None) -> list[Told]:
    found, numbers = [Told() for _ in asked], dict[int, int]()
    for step in range(6000):
        for index, each in enumerate(asked):
            if each.step == step:
                request = each.request(None if guesses is None else guesses[index])
                constraint = None if each.grammar is None else grammars()(each.grammar, request.stop_tokens)
                numbers[engine.add(request, constraint)] = index
        for number, index in numbers.items():
            if asked[index].abort_after is not None and step == asked[index].step + asked[index].abort_after:
                engine.abort(number)
        for output in engine.step():
            index = numbers[output.sequence]
            take(engine, found[index], asked[index], output)
        if engine.idle and step >= max(each.step for each in asked):
            return found
    raise AssertionError("the engine does not come to an end")


def take(engine: WatchedEngine, told: Told, asked: Wish, output: Output) -> None:
    if told.finish is None and output.token is not None:
        told.choices.append(engine.choices.take(output.sequence, len(asked.prompt) + len(told.outputs)))
        told.outputs.append(output)
        if output.token in asked.ends_at and output.finish is None:
            told.finish = FinishReason.STOP
            engine.finish(output.sequence)
    told.finish = told.finish or output.finish
    if output.finish is not None:
        told.scores = [score.logprob for score in engine.report(output.sequence).prompt_scores]


def compare(
    asked: Wish, plain: Told, drafted: Told, exact: bool, counts: Counter[str], ties: NearTies | None = None
) -> None:
    """Raise if an answer differs where rounding cannot be the reason; `ties` are those of experts."""
    counts["requests"] += 1
    if plain.finish is FinishReason.ABORT or drafted.finish is FinishReason.ABORT:
        counts["aborted"] += 1
        shorter = min(len(plain.outputs), len(drafted.outputs))
        plain, drafted = (Told(each.outputs[:shorter], choices=each.choices) for each in (plain, drafted))
    counts["tokens"] += len(plain.outputs)
    counts[f"ended by {plain.finish}"] += 1
    for place, (one, other) in enumerate(zip(plain.outputs, drafted.outputs)):
        choices = plain.choices[place], drafted.choices[place]
        text = asked.prompt + plain.tokens[:place]
        differ = difference_of(asked.params, place, *choices) > MOST_ROUNDING
        if differ and ties is not None and tied(asked.params, text, *choices, ties):
            counts["experts decided by rounding"] += 1
            return
        difference = check_inputs(asked.params, place, *choices, exact)
        counts[WIDEST] = max(counts[WIDEST], round(1e9 * difference))
        if one.token != other.token:
            # Both are right for their own logits: the random number lies between the two borders, or the gap is closed.
            found = [chosen(asked.params, choice) for choice in choices]
            assert found == [one.token, other.token], f"token {place} of {asked} is {other.token}, not {one.token}"
            assert not exact, f"token {place} differs in exact mode"
            counts["decided by rounding"] += 1
            return
        assert other.logprob == pytest.approx(one.logprob, abs=0.0 if exact else 5e-4)
        assert one.digest == other.digest
    assert len(plain.outputs) == len(drafted.outputs)
    assert plain.finish is drafted.finish
    most = 0.0 if exact else 5e-4
    differ, runs = drafted.scores != pytest.approx(plain.scores, abs=most), (plain.scores, drafted.scores)
    if differ and ties is not None and ties.explain(asked.prompt, *(partial(scored, run, most) for run in runs)):
        counts["experts decided by rounding"] += 1
        return
    assert drafted.scores == pytest.approx(plain.scores, abs=most)


def scored(scores: list[float], most: float, computed: Computed) -> bool:
    return computed.scores == pytest.approx(scores, abs=most)


def fuzz_round(family: str, seed: int, exact: bool, counts: Counter[str], wide: bool = False) -> None:
    """Answer random requests without drafts and with; compare, and count what happened."""
    random = Random(f"{family} {seed} {exact}")
    count, seats = (WIDE_ASKED, WIDE_SEATS) if wide else (ASKED, SEATS)
    kind = random.choice([*DRAFTERS, *(["mtp"] * 2 if family in WITH_HEAD else [])])
    found, asked = subject(family, exact, kind == "mtp"), wishes(random, exact, count)
    length = max(len(each.prompt) + each.params.max_tokens for each in asked)
    least = tight(family, exact, kind == "mtp", -(-length // 64) * 64, seats)
    undrafted = engine_of(found, exact, MEMORY, seats=seats)
    answers = answer_all(undrafted, asked)
    drafting = drafting_of(kind, random, asked, answers)
    guesses = [
        [3 if random.random() < 0.1 else token for token in answer.tokens[random.choice([0, 0, 2]) :]]
        for answer in answers
    ]
    memory = random.choice([MEMORY, least, 1.3 * least]) * (count // ASKED)
    engine = engine_of(
        found,
        exact,
        int(memory),
        drafting,
        seats,
        depth=random.randint(0, 1),
        max_tokens_per_step=random.choice([seats, 70, 200, 512]),
        cache=random.random() < 0.8,
        eviction=random.choice(["value", "lru", "flops"]),
        max_step_ms=random.choice([0.0, 0.001]),
    )
    if wide and memory < MEMORY and random.random() < 0.5:
        admit_everything(engine)
    launch = engine._device.launch
    engine._device.launch = lambda plan: counts.update(followed=int(plan.drafts.may_move)) or launch(plan)
    drafted = answer_all(engine, asked, guesses if kind == "prediction" else None)
    counts["preemptions"] += engine.planner.preemptions
    for (name, _), proposed in drafting.counts.proposed.items():
        counts[f"drafts by {name}"] += proposed
    counts["accepted"] += drafting.counts.accepted.total()
    operations = undrafted._device.operations
    ties = None if exact else NearTies(found.model, found.memories, operations, MEMORY, LONGEST)
    for each, plain, other in zip(asked, answers, drafted, strict=True):
        compare(each, plain, other, exact, counts, ties)


def fuzz(families: list[str], requests: int, exact: bool = False, first: int = 0) -> Counter[str]:
    """Compare at least this many requests, families in turn."""
    counts: Counter[str] = Counter()
    seed = first
    while counts["requests"] < requests:
        fuzz_round(families[seed % len(families)], seed, exact, counts)
        seed += 1
    return counts
