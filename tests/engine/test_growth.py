"""No container of a running engine grows with the number of requests that it has answered.

Limits of what is remembered are lowered, so that all of them are reached before the first count. The engine is idle
when it is counted: what is left belongs to no request.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.support.clocks import Ticks
from tests.support.held_memory import held
from tests.support.models import tiny_model
from weft import LLM
from weft.base.grammar import Grammar
from weft.base.options import Options
from weft.base.sampling import SamplingParams
from weft.base.tenants import tenant_digest
from weft.drafting.policy import choosing as drafting
from weft.drafting.policy.habits import SharedHabits
from weft.drafting.policy.suffix import SharedTexts
from weft.engine.loop import Engine
from weft.engine.preparation import OwnCommand
from weft.engine.protocol import Command, Drop, End, Event, Outputs, Question, Shutdown, Submit, Subscribe, Topic
from weft.engine.request import Request
from weft.engine.service import Service, ThreadInbox
from weft.memory import cache, tenancy
from weft.memory.misses import Ghosts, Tenants
from weft.memory.tiers import demotion
from weft.text import grammar

VOCABULARY = 259
AT_ONCE = 4
ROUNDS = 5
# Heaps with outdated entries, which are removed when there are some times as many as others. An entry has four values.
TIDIED = ("Ranking._heap", "TidyHeap._heap", "TidyHeap._unswept")
SIZES = {"memory": "3MiB", "disk_size": "4MiB", "max_length": 600, "max_sequences": AT_ONCE}
SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer", "maximum": %d}}, "required": ["n"]}'


def lower_limits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cache, "Ghosts", partial(Ghosts, 32))
    patch.setattr(cache, "Tenants", partial(Tenants, 32))
    patch.setattr(tenancy, "LEAST_NOTED", 16)
    patch.setattr(demotion, "LEAST_KEPT", 16)
    patch.setattr(drafting, "SharedTexts", partial(SharedTexts, 1024))
    patch.setattr(drafting, "SharedHabits", partial(SharedHabits, 64))
    patch.setattr(grammar, "MAX_COMPILED", 4)


def request_of(number: int) -> Request:
    """Return a request unlike all others: every way to ask comes again after some of them."""
    random = Random(number)
    tokens = [random.randrange(256) for _ in range(random.choice([3, 70, 300]))]
    if number % 3 == 0:
        # Prompts that part behind a common beginning.
        tokens = [7] * 130 + tokens[:50]
    params = SamplingParams(
        max_tokens=random.choice([1, 6, 12]),
        temperature=random.choice([0.0, 1.0]),
        ignore_eos=True,
        logprobs=random.choice([None, 2]),
        prompt_logprobs=1 if number % 7 == 0 else None,
        logit_bias={number % 250: 1.0} if number % 5 == 0 else None,
        bad_words=((number % 250, 3),) if number % 5 == 1 else (),
        allowed_token_ids=tuple(range(number % 100, 200)) if number % 5 == 2 else None,
        repetition_penalty=1.2 if number % 5 == 3 else 1.0,
        seed=number,
    )
    forms = {0: Grammar("regex", f"[a-z]{{2}}-{number}"), 4: Grammar("json_schema", SCHEMA % number)}
    return Request(
        np.array(tokens, np.int32),
        params,
        salt=b"tenant %d" % number if number % 4 == 1 else b"",
        priority=number % 2,
        snapshots=(64,) if number % 6 == 0 else (),
        grammar=forms.get(number % 8),
        prediction=np.array([1, 2, 3, number % 250], np.int32) if number % 8 == 3 else None,
    )


class Traffic(ThreadInbox):
    """Asks for rounds of requests, a few at once, leaves some of them, and counts what is held after each round."""

    def __init__(self, root: object, count: int) -> None:
        super().__init__()
        self.root, self.count = root, count
        self.counts: list[Counter[str]] = []
        self.sent = 0
        self.answered: set[int] = set()
        self.put(Subscribe())

    def take(self, wait: bool) -> list[Command | OwnCommand]:
        waiting = self.sent - len(self.answered)
        if not waiting and self.sent == self.count * (len(self.counts) + 1):
            if not wait:
                # Copies are under way.
                return super().take(wait)
            self.counts.append(held(self.root))
            if len(self.counts) == ROUNDS:
                return [Shutdown()]
        for number in range(self.sent, min(self.sent + AT_ONCE - waiting, self.count * (len(self.counts) + 1))):
            self.put(Submit(number, request_of(number)))
            self.sent += 1
            if number % 16 == 9:
                self.put(Question(number, [Topic.STATS, Topic.CACHE][number % 2], 5))
            if number % 32 == 17:
                self.put(Drop(number, tenant_digest(b"tenant %d" % (number - 4))))
        return super().take(wait)

    def hear(self, event: Event) -> None:
        if isinstance(event, Outputs):
            self.answered |= event.reports.keys()
            for output in event.outputs:
                if output.sequence % 9 == 4 and output.sequence not in self.answered:
                    self.put(End(output.sequence, stopped=output.sequence % 2 == 0))


def counts_of_rounds(folder: Path, count: int) -> list[Counter[str]]:
    options = {**tiny_model.OPTIONS, **SIZES, "disk": str(folder / "tier"), "draft": "suffix"}
    # By a clock of its own: how many durations are kept must not depend on the machine.
    llm = LLM.from_options(Options(**options, device="cpu", threads=1), progress=False, now=Ticks())
    traffic = Traffic(llm.engine, count)
    service = Service(llm.engine, traffic.hear, VOCABULARY)
    traffic.root = (llm.engine, service)
    assert service.run(traffic)
    return traffic.counts


def growing(counts: list[Counter[str]], least: int) -> set[str]:
    """Return what grew by some entries in every round after the first."""
    names = counts[-1].keys()
    return {name for name in names if all(later[name] - earlier[name] >= least for earlier, later in pairwise(counts))}


def test_no_container_grows_with_the_number_of_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower_limits(monkeypatch)
    count = 48
    counts = counts_of_rounds(tmp_path, count)
    assert growing(counts, count // 8) <= {*TIDIED}
    for found in counts:
        assert sum(found[name] for name in TIDIED) <= 5 * (256 + 8 * (found["Node"] + found["ResumePoint"]))
    # It has looked where things are.
    for name in ("SharedTexts", "Habits", "Ghosts", "Service", "Tenancy", "Demotion", "Journal", "Grammars", "Replays"):
        assert any(name in each for each in counts[-1]), name


def test_what_is_kept_of_every_request_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower_limits(monkeypatch)
    monkeypatch.setattr(Engine, "forget", lambda self, number: None)
    monkeypatch.setattr(cache, "Ghosts", Ghosts)
    found = growing(counts_of_rounds(tmp_path, 16), 2)
    assert {"Engine._sequences", "RecentKeys._newer"} <= found
