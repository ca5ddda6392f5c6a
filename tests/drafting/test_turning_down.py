"""Drafts that do not pay cost next to nothing: counted in steps, proposals and plans, never by a clock."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from math import inf
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.drafting.turning_down import ANSWER, Dear, Guesses, check_every_row_wakes_when_its_time_has_come
from tests.support.hashed.rolling import RollingDevice, rolling_spec
from weft.base.config import EngineConfig
from weft.base.plan import Landing, Plan
from weft.base.sampling import SamplingParams
from weft.drafting.policy.acceptance import MEMORY_OF_ALL, Acceptance
from weft.drafting.policy.choosing import LONGEST_PAUSE, RAREST_PROBE, Drafting, RowDrafts, SequenceDrafts
from weft.drafting.policy.costs import NEEDED, FreeDrafts, LearnedCosts
from weft.drafting.policy.suffix import SharedTexts
from weft.drafting.rows import FRUITLESS, RAREST_QUESTION, SEARCH_SECONDS, Candidate, DraftRows
from weft.engine.loop import Engine
from weft.engine.request import Request

SPEC = rolling_spec(cell=4, room=6)
ROWS = 4
PROMPT = 3


class Guessing(Drafting):
    def __init__(self, right_from: int = 10**9, costs=None) -> None:
        super().__init__(6, costs=Dear() if costs is None else costs)
        self.right_from = right_from
        self.begun: list[Guesses] = []

    def begin(self, prompt, salt, most, prediction, grammar=None):
        self.begun.append(Guesses(self.most, self.overall, self.right_from))
        return self.begun[-1]


class Recorder(RollingDevice):
    """Answers every prompt with `ANSWER`, and records the plans."""

    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)
        self.plans: list[Plan] = []

    def launch(self, plan: Plan) -> dict:
        self.plans.append(plan)
        return super().launch(plan)

    def execute(self, plan: Plan) -> Landing:
        plan = self.placed(plan)
        _, ends = self.samples_of(plan)
        found = [ANSWER[end - PROMPT] for end in ends]
        self.leave_on_board(plan, self._tokens(plan), found)
        return Landing(np.array(found, np.int32), None, None)


def request(count: int) -> Request:
    return Request(np.ones(PROMPT, np.int32), SamplingParams(max_tokens=count, temperature=0.0))


def answer_all(drafting: Drafting | None, depth: int, rounds: int = 1) -> Recorder:
    """The device after it has answered all prompts, and the answers are checked."""
    config = EngineConfig(memory_bytes=1 << 22, max_sequences=ROWS, max_length=2048, depth=depth, cache=False)
    device = Recorder(SPEC, config.memory_bytes, ROWS, lazy=True)
    engine = Engine(SPEC, device, config, drafting=drafting)
    for _ in range(rounds):
        found: dict[int, list[int]] = {}
        for _ in range(ROWS):
            engine.add(request(len(ANSWER)))
        while not engine.idle:
            for output in engine.step():
                found.setdefault(output.sequence, []).append(output.token)
        assert list(found.values()) == [ANSWER] * ROWS
    return device


def drafted(device: Recorder) -> int:
    return sum(bool(len(plan.drafts.counts)) for plan in device.plans)


def same(one: object, other: object) -> bool:
    """Compare all fields of two plans."""
    if is_dataclass(one):
        return all(same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    return np.array_equal(one, other)


@pytest.mark.parametrize("depth", [0, 1])
def test_drafts_that_are_never_right_take_less_than_two_percent_of_the_steps(depth: int) -> None:
    plain, drafting = answer_all(None, depth), Guessing()
    device = answer_all(drafting, depth)
    assert drafting.counts.proposed.total() > 0
    # In the first answers it learns; nothing is learned twice.
    assert drafted(device) <= 0.02 * len(plain.plans)
    assert len(device.plans) <= 1.02 * len(plain.plans)
    again = Guessing()
    twice = answer_all(again, depth, rounds=2)
    assert drafted(twice) - drafted(device) <= len(ANSWER) / RAREST_PROBE + 2


def test_rows_whose_drafts_do_not_pay_are_hardly_asked_for_any() -> None:
    drafting = Guessing()
    answer_all(drafting, depth=0)
    assert max(drafts.asked for drafts in drafting.begun) < 2 * len(ANSWER) / LONGEST_PAUSE


class Silent(Guesses):
    """Has no guess at all up to a length of the answer."""

    def find_drafts(self, answer, most, shared, ahead=0):
        found = super().find_drafts(answer, most, shared, ahead)
        return None if len(answer) < self.right_from else found


@pytest.mark.parametrize("depth", [0, 1])
def test_rows_without_any_guess_are_asked_ever_less_and_notice_the_first_one(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting = Guessing(right_from=400)
    monkeypatch.setattr(
        drafting, "begin", lambda *_: drafting.begun.append(Silent(6, drafting.overall, 400)) or drafting.begun[-1]
    )
    device = answer_all(drafting, depth)
    decodes = [plan for plan in device.plans if not (plan.start == 0).any()]
    first = next(number for number, plan in enumerate(decodes) if len(plan.drafts.counts))
    assert 400 - RAREST_QUESTION <= first <= 400 + RAREST_QUESTION
    # Then guesses follow, of which each takes several tokens.
    assert all(each.asked < 400 / RAREST_QUESTION + 2 * FRUITLESS + 300 / 2 for each in drafting.begun)
    assert all(each.asked > 400 / RAREST_QUESTION for each in drafting.begun)


@pytest.mark.parametrize("depth", [0, 1])
def test_plans_without_drafts_are_those_of_an_engine_without(depth: int) -> None:
    class Hopeless(FreeDrafts):
        def ratio(self, rows: int, drafts: int) -> float:
            return 100.0

    drafting = Guessing(costs=Hopeless())
    drafting.probes = lambda step, possible: False
    plain, other = answer_all(None, depth).plans, answer_all(drafting, depth).plans
    assert sum(drafts.asked for drafts in drafting.begun) > 0
    assert len(plain) == len(other)
    assert all(same(a, b) for a, b in zip(plain, other))


@pytest.mark.parametrize("depth", [0, 1])
def test_drafts_that_become_right_are_noticed(depth: int) -> None:
    drafting = Guessing(right_from=200)
    device = answer_all(drafting, depth)
    # Five hundred tokens of each row can be right. Rows sleep for up to 64 steps, and a probe comes after up to 256.
    assert drafting.counts.accepted.total() > 0.55 * ROWS * (len(ANSWER) - 200)
    assert len(device.plans) < 0.7 * len(ANSWER)


class Padded(FreeDrafts):
    """A step with drafts takes a third more, however many there are, as on a GPU with many rows."""

    def ratio(self, rows: int, drafts: int) -> float:
        return 4 / 3 if drafts else 1.0


def test_rows_that_began_at_different_times_draft_together_once_that_pays() -> None:
    """Each alone does not pay, so they sleep; if they woke one after the other, that would stay."""
    rows = 16
    drafting = Guessing(right_from=150, costs=Padded())
    config = EngineConfig(memory_bytes=1 << 23, max_sequences=rows, max_length=2048, cache=False)
    engine = Engine(SPEC, Recorder(SPEC, config.memory_bytes, rows), config, drafting=drafting)
    drafting.overall["suffix"] = Acceptance(0.3, memory=MEMORY_OF_ALL)
    for step in range(5000):
        if step < 5 * rows and step % 5 == 0:
            engine.add(request(len(ANSWER)))
        engine.step()
        if step > 5 * rows and engine.idle:
            break
    assert engine.idle
    assert drafting.counts.accepted.total() > 0.5 * rows * (len(ANSWER) - 150)


def test_a_new_sequence_begins_with_what_others_learned() -> None:
    drafting = Drafting(4)
    prompt = np.array([1, 2, 3] * 9, np.int32)
    first = drafting.begin(prompt, b"", None, None).find_drafts([], 4, drafting.shared)
    for _ in range(40):
        drafting.learn(drafting.begin(prompt, b"", None, None), first, 0)
    later = drafting.begin(prompt, b"", None, None).find_drafts([], 4, drafting.shared)
    assert later.worth[0] < 0.05 < first.worth[0]


def test_rows_that_no_recorded_step_holds_are_not_asked() -> None:
    drafting = Guessing(costs=FreeDrafts())
    drafting.counts_that_fit = lambda rows: [rows] if rows <= ROWS else []
    rows, seats = DraftRows(drafting, SimpleNamespace(), 2 * ROWS), np.arange(2 * ROWS)
    for seat in seats:
        rows.sit(seat, SimpleNamespace(drafting=drafting.begin(None, b"", None, None)))
    assert rows.awake(seats[:ROWS], 1) == seats[:ROWS].tolist()
    assert not rows.awake(seats, 1)


def test_every_row_wakes_when_its_time_has_come() -> None:
    """Random rows sit down, sleep and leave; all that are awake are found, and no other."""
    check_every_row_wakes_when_its_time_has_come()


class Searching:
    """A row that counts its searches for a guess, and has one from a given search on."""

    only_searches = True

    def __init__(self, finds_from: float = inf) -> None:
        self.searches = 0
        self.finds_from = finds_from

    def may_draft(self, answer: list[int], shared: SharedTexts) -> bool:
        self.searches += 1
        return self.searches >= self.finds_from


def searching_rows(step_seconds: float, finds_from: float = inf) -> tuple[DraftRows, list[SimpleNamespace]]:
    """Return 128 rows and their sequences, where steps without drafts take this long."""
    costs, count = LearnedCosts(), 128
    for _ in range(NEEDED):
        costs.observe(count, 0, step_seconds)
    rows = DraftRows(Drafting(4, costs=costs), SimpleNamespace(), count)
    sequences = [SimpleNamespace(seat=seat, drafting=Searching(finds_from), generated=[]) for seat in range(count)]
    for sequence in sequences:
        rows.sit(sequence.seat, sequence)
    # All may search at first.
    search(rows, sequences, 0)
    return rows, sequences


def search(rows: DraftRows, sequences: list[SimpleNamespace], number: int) -> int:
    """Return how many rows are asked after the plan of this number."""
    awake = rows.awake(np.arange(len(sequences)), number)
    rows.promising([sequences[seat] for seat in awake], number)
    return len(awake)


def test_rows_without_guesses_search_for_one_percent_of_a_step_or_while_the_host_waits() -> None:
    rows, sequences = searching_rows(step_seconds=0.003)
    asked = sum(search(rows, sequences, number) for number in range(1, 801))
    assert asked * SEARCH_SECONDS <= 0.01 * 800 * 0.003
    # In turns: none is forgotten.
    assert {sequence.drafting.searches for sequence in sequences} <= {4, 5}
    for _ in range(100):
        rows.note_wait(0.001)
    # One pause of the machine is no time to spend.
    rows.note_wait(1.0)
    asked = sum(search(rows, sequences, number) for number in range(801, 901))
    assert 0.9 < asked * SEARCH_SECONDS / (0.5 * 100 * 0.001) < 1.2


def test_where_a_guess_is_found_twice_as_many_rows_search() -> None:
    rows, sequences = searching_rows(step_seconds=0.001, finds_from=2)
    asked = [search(rows, sequences, number) for number in range(1, 30)]
    assert asked[:3] == [0, 0, 0]
    assert asked[-1] == len(sequences)


def test_nothing_is_drafted_before_a_step_without_drafts_was_measured() -> None:
    """Otherwise drafts from the first step on would leave nothing to compare with, and always look free."""
    costs = LearnedCosts()
    assert not costs.known(ROWS)
    for _ in range(NEEDED):
        costs.observe(ROWS, 0, 1.0)
    assert costs.known(ROWS)
    assert not costs.known(5 * ROWS)
    drafting = Guessing(right_from=0, costs=LearnedCosts())
    device = answer_all(drafting, depth=0)
    decodes = [plan for plan in device.plans if not (plan.start == 0).any()]
    assert not any(len(plan.drafts.counts) for plan in decodes[:NEEDED])
    assert drafted(device) > 0


@pytest.mark.parametrize(("before", "after"), [(64, 34), (16, 9), (8, 4)])
def test_a_batch_that_shrinks_at_once_learns_what_its_steps_take(before: int, after: int) -> None:
    """Where every token costs. If fewer rows seemed to take as long, drafts would look free and would never end."""
    costs = LearnedCosts()
    drafting = Drafting(7, costs=costs)
    for _ in range(4):
        costs.observe(before, 0, 0.2 + before)
    worth = tuple(0.35**place for place in range(1, 8))
    drafted = 0
    for _ in range(200):
        lengths = drafting.choose([RowDrafts("a", "a", (1,) * 7, worth)] * after, after, 1000)
        drafts = sum(lengths)
        costs.observe(after + drafts, drafts, 0.2 + after + drafts)
        drafted += drafts > 0
    assert drafted < 10


class HeadGuesses(SequenceDrafts):
    """Guesses of a head, which counts how often it is asked."""

    asked = 0

    def find_drafts(self, *_: Any, **__: Any) -> RowDrafts:
        self.asked += 1
        return RowDrafts("mtp", "mtp", (), (0.8, 0.6, 0.4))


def test_rows_that_come_too_late_for_their_drafts_sleep_and_leave_them_to_others() -> None:
    """Rows 0 to 3 look back at a token that is in flight, so that a head cannot guess for them yet."""
    drafting = Drafting(3, costs=FreeDrafts(), model="mtp")
    sampling: Any = SimpleNamespace(looks_back=np.arange(8) < 4, penalised=np.zeros(8, bool))
    head: Any = SimpleNamespace(
        drafts_stay_on_device=True,
        expect=lambda seat, guesses: None,
        begin=lambda rows, unverified=None: SimpleNamespace(
            counts={seat: number for seat, (_, number) in rows.items()}, tokens=dict
        ),
        draft=lambda rows: {},
    )
    rows = DraftRows(drafting, sampling, 8, head)
    sequences: list[Any] = []
    for seat in range(8):
        guesses = HeadGuesses(np.zeros(4, np.int32), b"", 3, None, False, drafting.overall, "mtp")
        found = SimpleNamespace(drafting=guesses, constraint=None, generated=[1], length=5, leaving=False, seat=seat)
        sequences.append(found)
        rows.sit(seat, sequences[-1])
    for number in range(1, 101):
        seats = rows.awake(np.arange(8), number)
        awake = {s: Candidate(sequences[s], 50, 0 if s < 4 else 3, s >= 4) for s in seats}
        rows.choose(awake, 8, 12, number, False, False, lambda count, drafts: True)
    asked = [each.drafting.asked for each in sequences]
    assert max(asked[:4]) < 10
    assert min(asked[4:]) == 100


class Clock:
    """Time that passes only by steps: 5 on the device, 2 on the host between two of them."""

    def __init__(self) -> None:
        self.now = self.free = 0.0

    def __call__(self) -> float:
        return self.now


class TimedDevice(Recorder):
    clock: Clock
    # Only the host knows where drafts end.
    builds_on_flight = None

    def launch(self, plan: Plan) -> dict:
        self.clock.free = max(self.clock.free, self.clock.now) + 5
        return super().launch(plan) | {"end": self.clock.free}

    def land(self, flight: dict) -> Landing:
        self.clock.now = max(self.clock.now, flight["end"])
        return super().land(flight)


class Observed(FreeDrafts):
    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def observe(self, tokens: int, drafts: int, seconds: float) -> None:
        self.seen.append((drafts, seconds))


@pytest.mark.parametrize(("depth", "plain", "with_drafts"), [(0, 7.0, 7.0), (1, 5.0, 7.0)])
def test_the_cost_of_drafts_includes_that_the_device_waits_for_the_host(
    depth: int, plain: float, with_drafts: float
) -> None:
    clock, costs, random = Clock(), Observed(), Random(1)

    class Sometimes(Guessing):
        def probes(self, step, possible):
            return False

        def choose(self, proposals, rows, most):
            wanted = random.random() < 0.3
            return [min(2, len(p.tokens)) if wanted else 0 for p in proposals]

    config = EngineConfig(memory_bytes=1 << 18, max_sequences=1, max_length=256, depth=depth)
    device = TimedDevice(SPEC, config.memory_bytes, 1)
    device.clock = clock
    engine = Engine(SPEC, device, config, drafting=Sometimes(costs=costs), now=clock)
    engine.add(request(200))
    while not engine.idle:
        clock.now += 2
        engine.step()
    found = {bool(drafts): {s for d, s in costs.seen if bool(d) == bool(drafts)} for drafts, _ in costs.seen}
    assert min(found[False]) == plain
    assert found[True] == {with_drafts}
