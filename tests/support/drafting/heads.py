"""An MTP head on the rolling-hash device: its entries are hashes that are checked when they are read."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import torch

from tests.support.drafting.following import following_workload
from tests.support.hashed.rolling import MASK, VOCABULARY, Remembered, RollingDevice, digest, mix, rolling_spec
from tests.support.hashed.workloads import Arrival, Run, check_answers, drive, tight_memory
from weft.base.config import EngineConfig
from weft.base.plan import NO_DRAFTS, Plan
from weft.base.sampling import SamplingParams
from weft.drafting.head import DraftHead
from weft.drafting.model import DecodedDrafts
from weft.drafting.policy.choosing import Drafting, SequenceDrafts
from weft.drafting.policy.costs import FreeDrafts
from weft.drafting.state_lines import StateLines
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.memory.ledger import Ledger
from weft.memory.spec import MemorySpec
from weft.runner.hidden_states import HiddenStates

HEAD = rolling_spec(recurrent=False)


def hidden_state(position: int, token: int) -> int:
    return mix(position + 1, token) >> 1


def own_state(guess: int) -> int:
    """What the head continues from after a guess."""
    return mix(9, guess) >> 1


def head_oracle(text: list[int], count: int) -> list[int]:
    """The guesses of a head that has nothing cached, after a text of which the target has computed all but the last."""
    states = [hidden_state(position, token) for position, token in enumerate(text[:-1])]
    found: list[int] = []
    while len(found) < count:
        entries = [0]
        for token, state in zip(text[1:] + found, states, strict=True):
            entries.append(mix(entries[-1], mix(token, state)))
        found.append(Remembered.by(HEAD).next_token(0, digest(np.array(entries[1:], np.uint64), 0), 0))
        states.append(own_state(found[-1]))
    return found


class Target(RollingDevice):
    """Leaves a state of every token, and of rows with drafts what it chose. Reads guesses in the same place."""

    def __init__(self, states: HiddenStates, spec: MemorySpec, memory: int, seats: int, lazy: bool) -> None:
        super().__init__(spec, memory, seats, lazy)
        self.states = states
        self.lines: dict[int, np.ndarray] = {}
        self.chosen: list[list[int]] = [[] for _ in range(seats)]
        self.met: Counter[str] = Counter()

    def launch(self, plan: Plan) -> dict:
        self.lines[plan.number] = self.states.rows.place(plan)
        return super().launch(plan)

    def placed(self, plan: Plan) -> Plan:
        found = super().placed(plan)
        if not len(plan.drafts.on_device):
            return found
        tokens, ends = found.tokens.copy(), np.cumsum(plan.end - plan.start).tolist()
        for row, (count, end) in enumerate(zip(plan.drafts.on_device.tolist(), ends, strict=True)):
            if count:
                tokens[end - count : end] = self.chosen[plan.seat[row]][:count]
                self.met["guessed"] += 1
                self.met["guessed beside prompts"] += bool((plan.end - plan.start > 1 + plan.drafts.counts).any())
                self.met["followed"] += bool(len(plan.drafts.unverified_before) and plan.drafts.unverified_before[row])
        return replace(found, tokens=tokens)

    def leave_on_board(self, plan: Plan, tokens: list[list[int]], sampled: list[int]) -> None:
        super().leave_on_board(plan, tokens, sampled)
        starts = plan.start.tolist()
        states = [hidden_state(at, t) for row, start in zip(tokens, starts) for at, t in enumerate(row, start)]
        self.states.lines[torch.from_numpy(self.lines.pop(plan.number)).long(), 0] = torch.tensor(states)
        for row, seat in enumerate(plan.seat.tolist()):
            if len(plan.drafts.counts) and plan.drafts.counts[row]:
                own = zip(plan.samples[0].tolist(), sampled, strict=True)
                self.chosen[seat] = [token for of_row, token in own if of_row == row]


class Head(RollingDevice):
    """Its rows begin and end where the target's board says."""

    def __init__(self, target: Target, memory: int) -> None:
        super().__init__(HEAD, memory, len(target.board))
        self.target, self.states = target, target.states
        self.lines: np.ndarray | None = None

    def launch(self, plan: Plan) -> dict:
        self.lines = self.states.rows.find(plan)
        self.target.execute_all()
        return super().launch(plan)

    def placed(self, plan: Plan) -> Plan:
        assert self.lines is not None
        refused = np.array([self.target.refused[seat] for seat in plan.seat], np.int32)
        if len(plan.drafts.unverified_before):
            by = np.where(plan.drafts.unverified_before > 0, refused, 0)
            return replace(plan, start=plan.start - by, end=plan.end - by, drafts=NO_DRAFTS)
        if not len(plan.drafts.unverified_inside):
            return plan
        tokens, lines, first, ends = [], [], 0, plan.end.copy()
        for row, (seat, length) in enumerate(zip(plan.seat.tolist(), (plan.end - plan.start).tolist(), strict=True)):
            kept = length - int(refused[row]) if plan.drafts.unverified_inside[row] else length
            known = length - int(plan.drafts.on_device[row])
            tokens += plan.tokens[first : first + known].tolist() + self.target.chosen[seat][: kept - known]
            lines += self.lines[first : first + kept].tolist()
            ends[row] = plan.start[row] + kept
            first += length
        self.lines = np.array(lines, np.int32)
        return replace(plan, end=ends, tokens=np.array(tokens, np.int32), drafts=NO_DRAFTS)

    def _tokens(self, plan: Plan) -> list[list[int]]:
        assert self.lines is not None
        states = iter(self.states.lines[torch.from_numpy(self.lines).long(), 0].tolist())
        return [[mix(token, next(states)) & MASK for token in row] for row in super()._tokens(plan)]

    def leave_on_board(self, plan: Plan, tokens: list[list[int]], sampled: list[int]) -> None:
        super().leave_on_board(plan, tokens, sampled)
        for row, guess in zip(plan.sampled.tolist(), sampled, strict=True):
            seat = int(plan.seat[row])
            self.states.lines[self.states.rows.own + seat, 0] = own_state(guess)
            before = self.target.chosen[seat] if plan.from_board[row] else []
            self.target.chosen[seat] = [*before, guess]


class CheckedHead(DraftHead):
    """Compares all guesses with the oracle, and replaces them: a right token, or by chance a wrong one.

    The host may read guesses only of an idle device that has no prompts.
    """

    engine: Engine
    # Share of the wrong ones.
    wrong = 0.2

    def __init__(self, answers: dict[tuple[int, ...], list[int]], seed: int, *args: object) -> None:
        super().__init__(*args, paranoid=True)
        self.answers, self.random, self.checked = answers, Random(f"guesses {seed}"), Counter[str]()

    def draft(self, asked):
        if any(count for _, count in asked.values()):
            planner = self.engine.planner
            assert planner.number == planner.landed, "a plan waits for guesses behind a flight"
            assert not planner.prefilling, "prompts wait for guesses"
            self.checked["landed"] += 1
        return super().draft(asked)

    def has_drafts_in_flight(self, seat, sequence):
        planner = self.engine.planner
        return planner.in_flight(sequence) and bool(planner.drafts.host_has_token[seat])

    def begin(self, asked, unverified=None):
        target = self.executor.target
        target.execute_all()
        texts = {}
        for seat, (sequence, count) in asked.items():
            texts[seat] = sequence.tokens(0, sequence.length).tolist()
            if unverified is None and count:
                assert not self.has_drafts_in_flight(seat, sequence), "a guess replaces what drafts in flight choose"
            if unverified is not None:
                texts[seat] += target.chosen[seat][: unverified[seat] + 1 - target.refused[seat]]
        found = super().begin(asked, unverified)
        if found is None:
            return None
        guesses = dict(found.tokens())
        for seat, tokens in guesses.items():
            assert list(tokens) == head_oracle(texts[seat], len(tokens)), f"after {len(texts[seat])} tokens"
            self.checked["guesses"] += 1
            self.checked["after drafts"] += unverified is not None
            prompt = asked[seat][0].request.prompt.tolist()
            known = self.answers[tuple(prompt)][len(texts[seat]) - len(prompt) :]
            right = [*known, *tokens][: len(tokens)]
            guesses[seat] = tuple((t + (self.random.random() < self.wrong)) % VOCABULARY for t in right)
            target.chosen[seat] = list(guesses[seat])
        return DecodedDrafts(found.counts, lambda: guesses)


class Lengths(Drafting):
    """Drafts of random lengths, which never wait. With `texts`, half of the sequences copy from one where they can."""

    def __init__(self, most: int, seed: int, texts: dict[tuple[int, ...], list[int]] | None = None) -> None:
        super().__init__(most, costs=FreeDrafts(), suffixes=False, model=DraftHead.name)
        self.random, self.texts = Random(f"lengths {seed}"), texts

    def begin(self, prompt, salt, most, prediction, grammar=None):
        if self.texts is not None and self.random.random() < 0.5:
            # Its answer, but some words are others: there the head drafts until it is found again.
            answer = [(t + (self.random.random() < 0.15)) % VOCABULARY for t in self.texts[tuple(prompt.tolist())]]
            prediction = np.array(answer, np.int32)
        return None if most == 0 else Awake(prompt, salt, self.most, prediction, suffixes=False, model=self.model)

    def choose(self, proposals, rows, most):
        return [self.random.randint(self.random.random() > 0.1, len(p.worth)) if p.worth else 0 for p in proposals]

    def plans_ahead(self, known, unknown, lost):
        return True


class Awake(SequenceDrafts):
    def pause(self) -> int:
        return 0


def run_head(seed: int, count: int = 4, texts: bool = False) -> Counter[str]:
    workload, random = following_workload(seed, count), Random(f"head {seed}")
    config, spec = workload.config, workload.spec
    answers = {tuple(a.prompt): a.answer(spec) for a in workload.arrivals}
    states = HiddenStates(StateLines(config.max_sequences, 4 * config.max_tokens_per_step), 1, torch.int64)
    target = Target(states, spec, config.memory_bytes, config.max_sequences, workload.lazy)
    own = replace(HEAD, draft_room=spec.draft_room)
    memory = tight_memory(own, workload.arrivals, random.choice([1.0, 1.5, 4.0]))
    ledger = Ledger(own, memory, config.max_sequences, config.max_length + 8, cache=config.cache, remember_freed=True)
    head = CheckedHead(answers, seed, states.rows, ledger, Head(target, memory), VOCABULARY, random.choice([7, 64]))
    drafting = Lengths(spec.draft_room, seed, answers if texts else None)
    engine = partial(Engine, drafting=drafting, draft_model=head)
    run = Run(engine(spec, target, config), target)
    head.engine = run.engine
    drive(workload, run)
    check_answers(workload, run)
    assert not ledger.leases
    head.flush()
    assert ledger.arena.used_slabs == 0, "something of the head is still owned"
    assert not states.rows.first.any()
    assert not states.rows.end.any()
    accepted = drafting.counts.accepted
    met = Counter({"preempted": run.engine.planner.preemptions, "accepted": accepted.total()})
    met["copied"] = sum(number for (drafter, _), number in accepted.items() if drafter == "prediction")
    return met + target.met + head.checked


def check_guesses_follow_drafts_in_flight() -> None:
    met: Counter[str] = Counter()
    for seed in range(20):
        met += run_head(seed)
    print(met)
    least = {"after drafts": 200, "followed": 200, "guessed": 250, "accepted": 300, "preempted": 1, "landed": 5}
    for name, count in (least | {"guessed beside prompts": 10}).items():
        assert met[name] >= count, met


def check_rows_copy_from_texts_beside_a_head_that_follows() -> None:
    met: Counter[str] = Counter()
    for seed in range(12):
        met += run_head(seed, texts=True)
    for name, least in {"after drafts": 60, "followed": 60, "copied": 25, "landed": 1}.items():
        assert met[name] >= least, met


def check_a_row_that_looks_back_lets_no_other_row_wait_for_a_landing(draft: int | None) -> None:
    """Other rows draft too, or not at all; the row that looks back has drafts when it is alone."""
    spec, memory, seats = rolling_spec(cell=HEAD.cell, room=3), 1 << 22, 4
    words = [((250,),), (), (), ()]
    prompts = [[number + 1, number + 2, number + 3] for number in range(seats)]
    # The first row outlives the others, so at last it has the device for itself.
    lengths = [80, 40, 40, 40]
    arrivals = [
        Arrival(prompt, length, 0, None, b"", 0, (), frozenset(), banned)
        for prompt, length, banned in zip(prompts, lengths, words, strict=True)
    ]
    answers = {tuple(arrival.prompt): arrival.answer(spec) for arrival in arrivals}
    states = HiddenStates(StateLines(seats, 256), 1, torch.int64)
    target = Target(states, spec, memory, seats, True)
    ledger = Ledger(replace(HEAD, draft_room=3), memory, seats, 160)
    head = CheckedHead(answers, 1, states.rows, ledger, Head(target, memory), VOCABULARY, 64)
    config = EngineConfig(memory_bytes=memory, max_sequences=seats, max_length=128, max_tokens_per_step=16, depth=1)
    head.engine = engine = Engine(spec, target, config, drafting=Lengths(3, 1), draft_model=head)
    for arrival in arrivals:
        most = None if arrival.bad_words else draft
        params = SamplingParams(
            max_tokens=arrival.count, temperature=0.0, bad_words=arrival.bad_words, ignore_eos=True, draft=most
        )
        engine.add(Request(np.array(arrival.prompt, np.int32), params))
    while head.checked["landed"] < 3:
        assert not engine.idle, "alone it has drafts"
        engine.step()
    # A prompt of many steps beside it.
    engine.add(Request(np.arange(120, dtype=np.int32), SamplingParams(max_tokens=0)))
    steps = 0
    while not engine.idle:
        engine.step()
        steps += bool(engine.planner.prefilling)
    assert steps > 3
    assert head.checked["landed"] > 3, "alone again it has drafts"
    assert head.checked["after drafts"] > 20 or draft == 0, "the others follow their drafts"
