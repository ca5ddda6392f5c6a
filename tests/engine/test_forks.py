"""A fork goes on as its answer did, from any token, whatever is running, evicted, retained or drafted meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drafting.scripted import ScriptedDrafting, Unfollowed, drafted_workload
from tests.support.engine.properties import parts, seed_of, thorough
from tests.support.hashed.rolling import RollingDevice, RoundingDevice, oracle, rolling_spec
from tests.support.hashed.tiered import run_tiered, tiered_workload
from tests.support.hashed.workloads import Run, Workload, check_answers, random_workload, run_workload
from weft.base.config import EngineConfig
from weft.base.errors import InvalidField
from weft.base.grammar import Grammar
from weft.base.retain import Retain
from weft.base.sampling import SamplingParams
from weft.engine import planner
from weft.engine.events import Output, Report
from weft.engine.loop import Engine
from weft.engine.pacing import canonical_end
from weft.engine.request import Request
from weft.engine.seat_sampling import SeatSampling
from weft.engine.service import checked
from weft.memory.keys import PrefixIdentity
from weft.memory.ledger import Ledger
from weft.memory.misses import Reason

EXAMPLES = int(os.environ.get("WEFT_EXAMPLES", "400")) // 24
MOST_FORKS = 8


@dataclass
class Fork:
    request: Request
    tokens: list[int] = field(default_factory=list)
    ended: bool = False

    def expected(self, workload: Workload) -> list[int]:
        request, done = self.request, len(self.request.answered)
        params = request.params
        count = min(done + params.max_tokens, workload.config.max_length - len(request.prompt))
        words = tuple(params.bad_words), params.allowed_token_ids
        whole = oracle(
            workload.spec,
            request.prompt.tolist(),
            count,
            request.stop_tokens,
            *words,
            workload.config.exact,
            params.seed,
        )
        return whole[done:]


class ForkingEngine(Engine):
    """Forks answers at random tokens between any two steps; callers see the outputs of their own requests only."""

    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)
        self.random = Random("forks")
        self.asked: dict[int, Request] = {}
        self.said: dict[int, list[int]] = {}
        self.forks: dict[int, Fork] = {}

    def add(self, request: Request, constraint: object = None) -> int:
        retain = (Retain(100.0),) if self.random.random() < 0.2 else ()
        request = msgspec.structs.replace(request, keeps_answer=self.random.random() < 0.7, retain=retain)
        number = super().add(request, constraint)
        self.asked[number], self.said[number] = request, []
        return number

    def step(self) -> list[Output]:
        if self.asked and len(self.forks) < MOST_FORKS and self.random.random() < 0.2:
            number = self.random.choice(list(self.asked))
            for _ in range(self.random.choice([1, 1, 3])):
                self._fork(self.asked[number], self.said[number])
        own = []
        for output in super().step():
            fork = self.forks.get(output.sequence)
            if fork is None:
                own.append(output)
            elif output.finish is not None:
                assert not fork.ended
                fork.ended = True
            if output.token is not None:
                (self.said[output.sequence] if fork is None else fork.tokens).append(output.token)
        return own

    def _fork(self, request: Request, said: list[int]) -> None:
        at = self.random.randint(0, len(said))
        while at and said[at - 1] in request.stop_tokens:
            at -= 1
        room = self.config.max_length - len(request.prompt) - at
        params = replace(request.params, max_tokens=self.random.randint(0, min(9, room)))
        answered = np.array(said[:at], np.int32)
        request = msgspec.structs.replace(request, params=params, answered=answered, snapshots=())
        self.forks[super().add(request)] = Fork(request)


def check_forks(workload: Workload, kind: type = RollingDevice, **more: object) -> int:
    run = run_workload(workload, partial(ForkingEngine, **more), kind)
    count = check_run(workload, run)
    run.engine.ledger.retentions.give_up()
    check_answers(workload, run)
    return count


def check_run(workload: Workload, run: Run) -> int:
    for fork in run.engine.forks.values():
        assert fork.ended
        assert fork.tokens == fork.expected(workload), "a fork went astray"
    return len(run.engine.forks)


def sampled(workload: Workload, seed: int) -> Workload:
    """The same workload, some of whose answers are drawn at random."""
    arrivals = [replace(each, seed=seed + n if n % 2 else None) for n, each in enumerate(workload.arrivals)]
    return replace(workload, arrivals=arrivals)


def check_drafted(seed: int, count: int = 6, **overrides: object) -> int:
    workload = drafted_workload(seed, count, **overrides)
    answers = {tuple(a.prompt): a.answer(workload.spec) for a in workload.arrivals}
    drafting = ScriptedDrafting(answers, workload.spec.draft_room, seed)
    return check_forks(workload, Unfollowed if seed % 2 else RollingDevice, drafting=drafting)


@pytest.mark.parametrize("part", parts(2))
@thorough(EXAMPLES // 2)
@given(seed=st.integers(0, 1 << 40), count=st.integers(1, 8))
def test_forks_go_on_as_their_answers_did_with_host_memory(part: int, seed: int, count: int) -> None:
    seed = seed_of(part, seed)
    workload = tiered_workload(seed, count)
    check_run(workload, run_tiered(workload, seed, engine_class=ForkingEngine))


@pytest.mark.parametrize("part", parts(2))
@thorough(EXAMPLES)
@given(seed=st.integers(0, 1 << 40), count=st.integers(1, 8))
def test_forks_go_on_as_their_answers_did(part: int, seed: int, count: int) -> None:
    seed = seed_of(part, seed)
    check_forks(sampled(random_workload(seed, count), seed))


@pytest.mark.parametrize("part", parts(2))
@thorough(EXAMPLES)
@given(seed=st.integers(0, 1 << 40), count=st.integers(1, 8))
def test_exact_forks_have_the_bits_of_the_answer_that_went_on(part: int, seed: int, count: int) -> None:
    """On a device that rounds differently for prompts and for decodes."""
    seed = seed_of(part, seed)
    check_forks(sampled(random_workload(seed, count, exact=True), seed))


@pytest.mark.parametrize("part", parts(2))
@thorough(EXAMPLES // 2)
@given(seed=st.integers(0, 1 << 40))
def test_forks_of_drafted_answers_never_see_a_refused_draft(part: int, seed: int) -> None:
    check_drafted(seed_of(part, seed))


class Alone:
    """An engine for one request after the other, with cells of 64 tokens as models have."""

    def __init__(self, exact: bool = False, memory: int = 1 << 20, **spec: object) -> None:
        self.spec = rolling_spec(**{"cell": 64, **spec})
        config = EngineConfig(memory_bytes=memory, max_length=4000, max_sequences=64, exact=exact, paranoid=True)
        device = (RoundingDevice if exact else RollingDevice)(self.spec, memory, 64)
        self.engine = Engine(self.spec, device, config)

    def run(self, *requests: Request) -> list[tuple[list[int], Report]]:
        numbers = [self.engine.add(each) for each in requests]
        found: dict[int, list[int]] = {number: [] for number in numbers}
        while not self.engine.idle:
            for output in self.engine.step():
                found[output.sequence] += [] if output.token is None else [output.token]
        return [(found[number], self.engine.report(number)) for number in numbers]


def ask(prompt: list[int], count: int, **more: object) -> Request:
    params = SamplingParams(max_tokens=count, temperature=0.0)
    return Request(np.array(prompt, np.int32), params, **more)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("heavy", [False, True])
def test_after_the_first_fork_at_a_token_each_computes_less_than_a_cell(exact: bool, heavy: bool) -> None:
    server, prompt = Alone(exact, memory=1 << 22, heavy=heavy), [n * n % 97 for n in range(1500)]
    [(answer, _)] = server.run(ask(prompt, 600, keeps_answer=True))
    for at in (37, 300, 411, 600):
        answered = np.array(answer[:at], np.int32)
        fork = ask(prompt, 20, answered=answered)
        known = len(prompt) + at
        # All at once: the first computes from the deepest point that was kept, the others wait for its point.
        found = server.run(*[fork] * 16)
        assert all(known - report.cached_tokens <= 64 for _, report in found[1:])
        assert all(tokens == (answer + found[0][0][600 - at :])[at : at + 20] for tokens, _ in found)
        assert known - server.run(fork)[0][1].cached_tokens <= 64


def test_an_exact_fork_of_an_answer_that_was_not_kept_decodes_it_again() -> None:
    server, prompt = Alone(exact=True), list(range(90))
    [(answer, _)] = server.run(ask(prompt, 300))
    [(tokens, report)] = server.run(ask(prompt, 20, answered=np.array(answer[:200], np.int32)))
    assert tokens == answer[200:220]
    assert report.cached_tokens == 64
    assert report.miss.reason is Reason.NEVER_COMPUTED


def test_a_fork_takes_no_grammar() -> None:
    server = Alone()
    with pytest.raises(InvalidField, match="must not be set for a fork"):
        server.engine.add(ask([1, 2], 3, answered=np.array([5], np.int32), grammar=Grammar("regex", "a")))


def test_the_tokens_of_a_forked_answer_are_in_the_vocabulary() -> None:
    with pytest.raises(InvalidField, match="answered must have token ids from 0 to 89"):
        checked(ask([1, 2], 3, answered=np.array([5, 90], np.int32)), 90)


# planted bugs ---------------------------------------------------------------------------------------------------------


def a_fork_starts_from_a_rejected_drafts_tail(patch: pytest.MonkeyPatch) -> None:
    """Settling keeps what was planned, refused drafts included."""
    original = Ledger.settle

    def settle(self, lease, grant, accepted):
        original(self, lease, grant, accepted if grant is None else grant.end)

    patch.setattr(Ledger, "settle", settle)


def a_fork_forgets_where_its_answer_began(patch: pytest.MonkeyPatch) -> None:
    """Cells that were decoded get the keys of a prompt's."""
    original = PrefixIdentity.keys
    patch.setattr(
        PrefixIdentity, "keys", lambda self, tokens, after=None, decoded_from=None: original(self, tokens, after)
    )


def a_fork_computes_its_answer_as_a_prompt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        planner,
        "canonical_end",
        lambda start, budget, prompt, total, cell: canonical_end(start, budget, total, total, cell),
    )


def a_fork_begins_its_samples_anew(patch: pytest.MonkeyPatch) -> None:
    """The random numbers of an answer's first tokens come again."""
    original = SeatSampling.sit

    def sit(self, sequence):
        original(self, sequence)
        self.sampled[sequence.seat] = 0

    patch.setattr(SeatSampling, "sit", sit)


def check_seeds(check: Callable[[int], int]) -> None:
    for seed in range(400):
        check(seed)


def check_sampled(seed: int) -> int:
    return check_forks(sampled(random_workload(seed, 8), seed))


def check_exact(seed: int) -> int:
    return check_forks(random_workload(seed, 8, exact=True))


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (a_fork_starts_from_a_rejected_drafts_tail, check_drafted),
        (a_fork_forgets_where_its_answer_began, check_exact),
        (a_fork_computes_its_answer_as_a_prompt, check_exact),
        (a_fork_begins_its_samples_anew, check_sampled),
    ],
    ids=lambda each: each.__name__,
)
def test_planted_bugs_of_forks_are_caught(plant: Callable, check: Callable[[int], int], monkeypatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        check_seeds(check)
